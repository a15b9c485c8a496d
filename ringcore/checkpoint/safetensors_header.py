"""Parses the header of a safetensors file: tensor offsets, checked against the file before any tensor is read.

8 bytes            header_size bytes                    the rest
header_size (LE)   {"name": {dtype, shape, [begin, end]}}   data; offsets count from its first byte
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ringcore.checkpoint.model_file import open_model_file
from ringcore.errors import ModelLoadError

__all__ = ["DTYPE_BYTES", "DTYPE_NAMES", "TensorEntry", "TensorIndex", "read_safetensors_header"]

HEADER_MAX_BYTES = 100_000_000  # the format's own cap
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
# The names in torch of those that weights may have.
DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor: bytes `begin` to `end` of `file`, row-major, little-endian. `dtype` is a key of `DTYPE_BYTES`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class _RawEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors_header(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """The tensors of one file by name, in the order of their offsets.

    Raises `ModelLoadError` naming the file, and the faulty tensor: truncated, an offset outside the file, overlapping
    tensors, a length that does not match dtype and shape.
    """
    path = os.fspath(path)
    raw, data_begin, file_bytes = _read_raw(path)
    entries = {name: _entry(path, name, value, data_begin, file_bytes) for name, value in raw.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    previous_name, previous_end = "", data_begin
    for name, entry in ordered.items():
        if entry.nbytes and entry.begin < previous_end:
            raise _bad(path, f"tensors {previous_name!r} and {name!r} overlap", name)
        if entry.nbytes:
            previous_name, previous_end = name, entry.end
    return ordered


def _bad(path: str, what: str, tensor: str | None = None) -> ModelLoadError:
    details = {"path": path} if tensor is None else {"path": path, "tensor": tensor}
    return ModelLoadError(f"{path}: {what}", **details)


def _read_raw(path: str) -> tuple[dict[str, _RawEntry], int, int]:
    """The header's entries, the offset of the data, the file size."""
    try:
        with open_model_file(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < 8:
                raise _bad(path, f"has {file_bytes} bytes, not a safetensors file; download it again")
            header_bytes = int.from_bytes(_read_whole(file, path, 8), "little")
            if header_bytes > HEADER_MAX_BYTES:
                raise _bad(path, f"its header claims {header_bytes} bytes, the format allows {HEADER_MAX_BYTES}")
            if 8 + header_bytes > file_bytes:
                raise _bad(path, f"truncated: the header needs {8 + header_bytes} bytes, the file has {file_bytes}")
            header = _read_whole(file, path, header_bytes)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    try:
        raw: dict[str, Any] = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_RawEntry) for name, value in raw.items()}
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise _bad(path, f"its header is not valid: {error}") from error
    return entries, 8 + header_bytes, file_bytes


def _read_whole(file: io.FileIO, path: str, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = file.read(num_bytes - len(data))
        if not piece:
            raise _bad(path, f"truncated: it ends within its header of {num_bytes} bytes; download it again")
        data += piece
    return data


def _entry(path: str, name: str, raw: _RawEntry, data_begin: int, file_bytes: int) -> TensorEntry:
    begin, end = raw.data_offsets
    if raw.dtype not in DTYPE_BYTES:
        raise _bad(path, f"tensor {name!r} has the dtype {raw.dtype!r}; known: {', '.join(DTYPE_BYTES)}", name)
    if not 0 <= begin <= end:
        raise _bad(path, f"tensor {name!r} has the offsets {begin} to {end}", name)
    if any(dim < 0 for dim in raw.shape):
        raise _bad(path, f"tensor {name!r} has the shape {raw.shape}", name)
    if end - begin != (needed := math.prod(raw.shape) * DTYPE_BYTES[raw.dtype]):
        raise _bad(
            path, f"tensor {name!r}: {raw.dtype} {raw.shape} takes {needed} bytes, its offsets say {end - begin}", name
        )
    if data_begin + end > file_bytes:
        raise _bad(
            path,
            f"truncated: tensor {name!r} ends at byte {data_begin + end}, the file has {file_bytes}; download it again",
            name,
        )
    return TensorEntry(path, raw.dtype, tuple(raw.shape), data_begin + begin, data_begin + end)


class TensorIndex(Mapping[str, TensorEntry]):
    """The tensors of all shards of a model, by name."""

    def __init__(self, files: Iterable[str]) -> None:
        """Reads every header. Raises `ModelLoadError`, also where two files hold a tensor of one name."""
        self._entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in read_safetensors_header(file).items():
                if (other := self._entries.get(name)) is not None:
                    raise _bad(file, f"tensor {name!r} is also in {other.file}", name)
                self._entries[name] = entry

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
