"""What a job is: the input, the model and all else that its results depend on; and how two jobs differ."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError

__all__ = ["VERSION", "Compression", "InputFacts", "Job", "LineFormat", "check_same", "model_facts"]

LineFormat = Literal["openai", "plain"]
Compression = Literal["none", "gzip", "zstd"]
VERSION: Literal[1] = 1


class InputFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input's content, decompressed."""

    sha256: str
    num_bytes: int


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a journal.

    num_lines: of the input; num_requests: those that are not blank. model: engine options and files that the texts
    depend on. defaults: sampling parameters of plain lines. answers: how answers are written.
    """

    version: Literal[1]
    input: InputFacts
    num_lines: int
    num_requests: int
    format: LineFormat
    order: str
    compression: Compression
    model: dict[str, Any]
    defaults: dict[str, Any]
    answers: dict[str, Any]

    @property
    def hash(self) -> str:
        """Of the whole, in hexadecimal digits."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=16).hexdigest()


# The options by which texts differ. With others (ranks, memory, batch sizes) a job may be resumed: greedy and seeded
# texts do not depend on them, but for rounding.
_MODEL_OPTIONS = (
    "model", "tokenizer", "dtype", "load_format", "model_impl", "max_model_len", "seed", "logits_processors",
)  # fmt: skip


def model_facts(config: EngineConfig) -> dict[str, Any]:
    """The options, and the configuration's hash and the names and sizes of the weight files."""
    facts: dict[str, Any] = {name: config.model.__getattribute__(name) for name in _MODEL_OPTIONS}
    files = config.model.files
    hashed = hashlib.blake2b(digest_size=16)
    if files.config_path is not None:
        hashed.update(Path(files.config_path).read_bytes())
    for file in files.weight_files:
        hashed.update(f"{Path(file).name} {os.path.getsize(file)}\n".encode("utf-8", "surrogateescape"))
    return facts | {"files": hashed.hexdigest()}


def check_same(begun: Job, asked: Job, input_path: str) -> None:
    """Raises `ConfigError` that names what of a job has changed since it was begun."""
    if begun.input != asked.input:
        before, now = begun.input, asked.input
        raise _changed(
            "input",
            f"the content of {input_path!r} has changed: it had {before.num_bytes} bytes of SHA-256 "
            f"{before.sha256[:16]}, now {now.num_bytes} of {now.sha256[:16]}",
        )
    for field in ("format", "order", "compression"):
        _check_field(field, begun.__getattribute__(field), asked.__getattribute__(field))
    for part in ("model", "defaults", "answers"):
        ours, theirs = begun.__getattribute__(part), asked.__getattribute__(part)
        for name in sorted(ours.keys() | theirs.keys()):
            _check_field(name, ours.get(name), theirs.get(name))


def _check_field(name: str, before: object, now: object) -> None:
    if before != now:
        raise _changed(name, f"the job began with {before!r}, and this is {now!r}")


def _changed(name: str, what: str) -> ConfigError:
    remedy = "resume it as it was begun, or begin anew with another output"
    return ConfigError(f"{name}: {what}; {remedy}", option=name, value=what)
