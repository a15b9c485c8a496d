"""Reads an input once before the job: its identity, the form and number of its lines, and ids that occur twice."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ringcore.batch.duplicates import IdCheck
from ringcore.batch.job import InputFacts, LineFormat
from ringcore.batch.sources import HashedChunks, ScanStopped, open_input, split_lines
from ringcore.errors import ConfigError

__all__ = ["Scan", "ScanStopped", "identify", "scan"]

_SHOWN_DUPLICATES = 10


class Scan(msgspec.Struct, frozen=True):
    input: InputFacts
    num_lines: int
    num_requests: int
    format: LineFormat


class _Head(msgspec.Struct):
    """What tells the form of a line, and its id. Other fields are skipped."""

    custom_id: str | int | None = None
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_openai(self) -> bool:
        return any(field is not msgspec.UNSET for field in (self.method, self.url, self.body))


def identify(path: str, is_stopped: Callable[[], bool]) -> InputFacts:
    """The identity alone, which is faster. Raises `ConfigError`, `ScanStopped`."""
    with open_input(path) as stream:
        hashed = HashedChunks(stream, is_stopped)
        for _ in hashed:
            pass
    return hashed.facts()


def scan(path: str, asked: str, max_line_bytes: int, folder: str, is_stopped: Callable[[], bool]) -> Scan:
    """asked: the form of the lines, or "auto". folder: for temporary files. Raises `ConfigError` for an input that
    cannot be read and for ids that occur twice; and `ScanStopped`."""
    ids, decoder = IdCheck(folder), msgspec.json.Decoder(_Head)
    num_lines = num_requests = 0
    form: LineFormat | None = "openai" if asked == "openai" else "plain" if asked == "plain" else None
    with open_input(path) as stream:
        hashed = HashedChunks(stream, is_stopped)
        for line in split_lines(iter(hashed), max_line_bytes):
            num_lines += 1
            if line is not None and not line.strip():
                continue
            num_requests += 1
            head = None if line is None else _head(decoder, line)
            if head is None:
                continue
            form = form or ("openai" if head.is_openai else "plain")
            if head.custom_id is not None:
                ids.add(str(head.custom_id), num_lines)
            elif form == "plain":
                ids.add(str(num_lines), num_lines)
    _refuse_duplicates(path, ids.duplicates(_SHOWN_DUPLICATES))
    return Scan(hashed.facts(), num_lines, num_requests, form or "plain")


def _head(decoder: msgspec.json.Decoder[_Head], line: bytes) -> _Head | None:
    """None for a line that will be an error record."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_duplicates(path: str, pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    shown = ", ".join(f"lines {first} and {other}" for first, other in pairs)
    more = " and perhaps more" if len(pairs) == _SHOWN_DUPLICATES else ""
    raise ConfigError(
        f"input={path!r}: a custom_id occurs twice: {shown}{more}; give each line its own", option="input", value=path
    )
