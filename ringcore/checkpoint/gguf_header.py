"""Parses the header of a GGUF file: metadata and tensor offsets, every length checked against the file size.

    magic "GGUF" | version u32 | num_tensors u64 | num_metadata u64
    metadata      key: string, type: u32, value
    tensor infos  name: string, num_dims: u32, dims: u64 each (fastest first), ggml type: u32, offset: u64
    padding to general.alignment, then the data; offsets count from its first byte

A string is a u64 length and UTF-8 bytes; an array a u32 type, a u64 length and its values. All little-endian.
The package `gguf` parses the same, but takes seconds for the token arrays.
"""

from __future__ import annotations

import io
import math
import os
import struct
from typing import Any

import msgspec
import numpy as np

from ringcore.checkpoint.model_file import open_model_file
from ringcore.errors import ModelLoadError

__all__ = ["GGUFHeader", "GGUFTensorInfo", "LongArray", "read_gguf_header"]

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMS = 4  # the format's own cap
HEADER_MAX_BYTES = 128 << 20  # the largest vocabularies take 20 MiB
_MAX_ENTRIES = 1 << 18  # tensors, or keys
_READ_BYTES = 1 << 20
_LONG = 1024  # elements; longer arrays belong to the vocabulary


class LongArray(msgspec.Struct, frozen=True):
    """The placeholder of an array that was not read."""

    length: int


class GGUFTensorInfo(msgspec.Struct, frozen=True):
    """One tensor: `nbytes` bytes at `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]  # numpy's order, slowest first
    ggml_type: int  # a value of gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFHeader(msgspec.Struct, frozen=True):
    path: str
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]


def read_gguf_header(path: str | os.PathLike[str], *, long_arrays: bool = False) -> GGUFHeader:
    """The header of a GGUF file of version 2 or 3.

    Arrays of more than 1024 values (the vocabulary) are read only if `long_arrays`: else they are
    `LongArray` placeholders. Raises `ModelLoadError` where the file is truncated or malformed.
    """
    path = os.fspath(path)
    try:
        with open_model_file(path) as file:
            return _Parser(path, file, long_arrays).header()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}", path=path) from error


class _Parser:
    """Parses the header. `position` never exceeds the end of `data`: only `_take` advances it.

    data: the prefix of the file read so far. Not mmap: a file that shrinks while it is mapped raises SIGBUS.
    """

    def __init__(self, path: str, file: io.FileIO, long_arrays: bool) -> None:
        self.path = path
        self.file = file
        self.data = bytearray()
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self.long_arrays = long_arrays

    def header(self) -> GGUFHeader:
        if not self.size:
            raise self.error("empty file; download it again")
        self._read_to(min(4, self.size))
        if self.data[:4] != b"GGUF":
            raise self.error("not a GGUF file: it does not begin with 'GGUF'")
        self._take(4)
        version = self._scalar(_U32)
        if version not in (2, 3):
            what = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise self.error(f"a GGUF file of {what}; little-endian files of version 2 and 3 can be read")
        num_tensors, num_metadata = self._count(_U64.size + 4 + 8), self._count(_U64.size + 4)
        if max(num_tensors, num_metadata) > _MAX_ENTRIES:
            raise self.error(f"it claims {num_tensors} tensors and {num_metadata} keys, {_MAX_ENTRIES} are allowed")
        metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._string()
            if key in metadata:
                raise self.error(f"metadata key {key!r} comes twice")
            metadata[key] = self._value(self._scalar(_U32), 0)
        raw = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._place(raw, metadata.get("general.alignment", 32))
        return GGUFHeader(self.path, version, metadata, tensors)

    def error(self, what: str, tensor: str | None = None) -> ModelLoadError:
        details = {"path": self.path} if tensor is None else {"path": self.path, "tensor": tensor}
        return ModelLoadError(f"{self.path}: {what}", **details)

    def _take(self, nbytes: int) -> int:
        """Advances by `nbytes`; returns the position before."""
        begin = self.position
        if nbytes > self.size - begin:
            raise self.error(
                f"truncated: the header needs {nbytes} bytes at byte {begin}, the file has {self.size}; "
                "download it again"
            )
        self._read_to(begin + nbytes)
        self.position = begin + nbytes
        return begin

    def _read_to(self, end: int) -> None:
        if end > HEADER_MAX_BYTES:
            raise self.error(f"its header needs {end} bytes, more than the {HEADER_MAX_BYTES} allowed")
        while len(self.data) < end:
            piece = self.file.read(max(_READ_BYTES, end - len(self.data)))
            if not piece:
                raise self.error(f"truncated: it had {self.size} bytes and ends at {len(self.data)}; download it again")
            self.data += piece

    def _scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.data, self._take(kind.size))[0]

    def _count(self, min_bytes_each: int) -> int:
        """Reads a u64 count of entries of at least `min_bytes_each`; refuses more than the file can hold."""
        count: int = self._scalar(_U64)
        if count * min_bytes_each > self.size - self.position:
            raise self.error(f"truncated: it claims {count} entries at byte {self.position}, the file has {self.size}")
        return count

    def _string(self) -> str:
        length: int = self._scalar(_U64)
        begin = self._take(length)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a string at byte {begin} is not UTF-8") from error

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(depth)
        raise self.error(f"a metadata value of type {kind} at byte {self.position} is not known")

    def _array(self, depth: int) -> Any:
        kind = self._scalar(_U32)
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            length = self._count(scalar.size)
            begin = self._take(length * scalar.size)
            if length > _LONG and not self.long_arrays:
                return LongArray(length)
            dtype = np.dtype(scalar.format)
            return np.frombuffer(self.data[begin : self.position], dtype).tolist()
        length = self._count(_U64.size)
        if kind == _STRING and length > _LONG and not self.long_arrays:
            for _ in range(length):
                self._take(self._scalar(_U64))
            return LongArray(length)
        return [self._value(kind, depth + 1) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar(_U32)
        if num_dims > _MAX_DIMS:
            raise self.error(f"tensor {name!r} has {num_dims} dimensions, the format allows {_MAX_DIMS}", name)
        dims = [self._scalar(_U64) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._scalar(_U32), self._scalar(_U64)

    def _place(self, raw: list[tuple[str, tuple[int, ...], int, int]], alignment: object) -> dict[str, GGUFTensorInfo]:
        """The tensors with their offsets in the file, checked to be inside the file and disjoint."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, a power of two is needed")
        data_begin = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for name, shape, ggml_type, offset in raw:
            if name in tensors:
                raise self.error(f"tensor {name!r} comes twice", name)
            nbytes = self._tensor_bytes(name, shape, ggml_type)
            if offset % alignment:
                raise self.error(f"tensor {name!r}: its offset {offset} is no multiple of {alignment}", name)
            end = data_begin + offset + nbytes
            if end > self.size:
                raise self.error(
                    f"truncated: tensor {name!r} ends at byte {end}, the file has {self.size}; download it again", name
                )
            tensors[name] = GGUFTensorInfo(name, shape, ggml_type, data_begin + offset, nbytes)
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.error(f"tensors {before!r} and {info.name!r} overlap", info.name)
            end, before = info.offset + info.nbytes, info.name
        return tensors

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], ggml_type: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.1 s, only where there is a GGUF file

        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
        except (ValueError, KeyError):
            raise self.error(f"tensor {name!r} has the ggml type {ggml_type}, which is not known", name) from None
        if shape and shape[-1] % block_size:
            raise self.error(f"tensor {name!r}: rows of {shape[-1]} do not divide into blocks of {block_size}", name)
        nbytes: int = math.prod(shape) // block_size * block_bytes
        return nbytes
