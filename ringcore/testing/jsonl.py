"""Files of one JSON object a line, each of one type; errors name file, line and field."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ringcore.errors import InvalidRequestError

__all__ = ["bad_line", "read_jsonl"]

_Line = TypeVar("_Line", bound=msgspec.Struct)


def read_jsonl(file: str | os.PathLike[str], kind: type[_Line], what: str) -> Iterator[tuple[int, _Line]]:
    """(number of the line, from 1; the line), blank lines left out. `what` is e.g. "trace".

    Raises `InvalidRequestError`.
    """
    path, decoder = Path(file), msgspec.json.Decoder(kind)
    try:
        with path.open("rb") as source:
            for number, text in enumerate(source, start=1):
                if text.strip():
                    yield number, _decode(decoder, text, f"{what} {str(path)!r}", number)
    except OSError as error:
        raise InvalidRequestError(
            f"{what} {str(path)!r}: cannot be read: {error.strerror or error}", field=what, value=str(path)
        ) from error


def _decode(decoder: msgspec.json.Decoder[_Line], text: bytes, where: str, number: int) -> _Line:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        said, _, field = str(error).partition(" - at `$.")
        raise bad_line(where, number, field.removesuffix("`") or "line", said) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_line(where, number, "line", f"it is no JSON: {error}") from error


def bad_line(where: Any, number: int, field: str, said: str) -> InvalidRequestError:
    """where: what is read, and its file."""
    return InvalidRequestError(f"{where}, line {number}: {field}: {said}", field=field, value=number)
