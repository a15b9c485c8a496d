"""Tensors of a GGUF file under their Hugging Face names, dequantized to float32. numpy and `gguf` only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ringcore.checkpoint.family import Families
from ringcore.checkpoint.gguf_header import GGUFTensorInfo, read_gguf_header
from ringcore.checkpoint.gguf_names import stored_tensors
from ringcore.checkpoint.model_file import open_model_file
from ringcore.errors import ModelLoadError

__all__ = ["GGUFTensors", "read_gguf_tensor"]

ReadRows = Callable[[str | os.PathLike[str], GGUFTensorInfo, int, int], np.ndarray]

# Bytes of float32 dequantized at once, so that the temporaries stay in the CPU's cache.
_PIECE_BYTES = 1 << 18


def read_gguf_tensor(
    path: str | os.PathLike[str], info: GGUFTensorInfo, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Rows `start` to `stop` of one tensor, in the file's own order: float32, [stop - start, *shape[1:]].

    Only the bytes of these rows are read. Raises `ModelLoadError` where the type cannot be dequantized or the
    file is shorter than its header says.
    """
    from gguf.constants import GGMLQuantizationType

    num_rows = info.shape[0] if info.shape else 1
    stop = num_rows if stop is None else stop
    assert 0 <= start <= stop <= num_rows, (info.name, start, stop, num_rows)
    if num_rows == 0 or info.nbytes == 0:
        return np.empty((stop - start, *info.shape[1:]), np.float32)
    kind = GGMLQuantizationType(info.ggml_type)
    if len(info.shape) <= 1:  # a vector may be one quantized block, so it is read whole
        return _dequantize(path, info, kind, _read(path, info, 0, info.nbytes))[start:stop]
    row_bytes = info.nbytes // num_rows
    data = _read(path, info, start * row_bytes, (stop - start) * row_bytes)
    return _dequantize(path, info, kind, data).reshape(stop - start, *info.shape[1:])


def _stored_rows(path: str | os.PathLike[str], info: GGUFTensorInfo, start: int, stop: int) -> np.ndarray:
    row_bytes = info.nbytes // info.shape[0]
    return _read(path, info, start * row_bytes, (stop - start) * row_bytes).reshape(stop - start, row_bytes)


def _read(path: str | os.PathLike[str], info: GGUFTensorInfo, begin: int, nbytes: int) -> np.ndarray:
    with open_model_file(path) as file:
        data = np.fromfile(file, np.uint8, nbytes, offset=info.offset + begin)
    if data.nbytes != nbytes:
        raise ModelLoadError(
            f"{path}: truncated: tensor {info.name!r} needs {nbytes} bytes at byte {info.offset + begin}, "
            f"{data.nbytes} are there; download it again",
            path=str(path),
            tensor=info.name,
        )
    return data


def _dequantize(path: str | os.PathLike[str], info: GGUFTensorInfo, kind: Any, data: np.ndarray) -> np.ndarray:
    """Raw bytes -> [n] float32."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind == GGMLQuantizationType.F32:
        return data.view("<f4").astype(np.float32, copy=False)
    if kind == GGMLQuantizationType.F16:
        return data.view("<f2").astype(np.float32)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_size), np.float32)
    step = max(1, _PIECE_BYTES // (block_size * 4))
    try:
        for begin in range(0, len(blocks), step):
            piece = blocks[begin : begin + step]
            # As one row: `gguf` loops over groups of 16 rows in Python.
            values[begin : begin + step] = dequantize(piece.reshape(1, -1), kind).reshape(len(piece), block_size)
    except NotImplementedError as error:  # how `gguf` says that it knows a type's size, and not its layout
        raise ModelLoadError(
            f"{path}: tensor {info.name!r} has the type {kind.name}, which the installed package gguf cannot expand",
            path=str(path),
            tensor=info.name,
        ) from error
    return values.reshape(-1)


class GGUFTensors:
    """The tensors of a GGUF file by their Hugging Face names, in the layout of a Hugging Face checkpoint."""

    def __init__(self, path: str | os.PathLike[str], families: Families, wanted: Iterable[str] = ()) -> None:
        """Reads the header. wanted: see `stored_tensors`. Raises `ModelLoadError`, also for a tensor that the model
        does not have."""
        header = read_gguf_header(path)
        self.path = header.path
        self._stored = stored_tensors(header, families, wanted)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its Hugging Face name, in the order of the model."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def is_read_whole(self, name: str) -> bool:
        """Whether reading some of its rows takes as long as reading all of them."""
        stored = self._stored[name]
        return stored.transposed and len(stored.shape) == 2

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` (None: all) of a tensor: float32, [stop - start, *shape[1:]].

        Raises `KeyError` for a name that is not in `shapes`, `ModelLoadError` where the data cannot be read.
        """
        stored = self._stored[name]
        stop = stored.shape[0] if stop is None else stop
        if self.is_read_whole(name):
            return read_gguf_tensor(self.path, stored.infos[0]).T[start:stop]
        if stored.num_turned_heads is not None:
            return self._turned(stored.infos[0], stored.num_turned_heads, start, stop)
        parts = [read_gguf_tensor(self.path, info, start, stop) for info in stored.infos]
        values = parts[0] if len(parts) == 1 else np.stack(parts, 2).reshape(len(parts[0]), -1, *parts[0].shape[2:])
        values = values.swapaxes(-1, -2) if stored.transposed else values
        return values - 1 if stored.plus_one else values

    def kinds(self) -> dict[str, str]:
        """The GGML type, by its name, of every matrix whose rows the file has as they are, but for their order."""
        from gguf.constants import GGMLQuantizationType

        return {
            name: GGMLQuantizationType(stored.infos[0].ggml_type).name
            for name, stored in self._stored.items()
            if len(stored.shape) == 2 and len(stored.infos) == 1 and not (stored.transposed or stored.plus_one)
        }

    def read_stored(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of one of `kinds`, as the file has them: uint8, [stop - start, bytes of a row]. Raises
        as `read`."""
        stored = self._stored[name]
        if stored.num_turned_heads is not None:
            return self._turned(stored.infos[0], stored.num_turned_heads, start, stop, _stored_rows)
        return _stored_rows(self.path, stored.infos[0], start, stop)

    def _turned(
        self, info: GGUFTensorInfo, num_heads: int, start: int, stop: int, read: ReadRows = read_gguf_tensor
    ) -> np.ndarray:
        """Rows are permuted within a head, so whole heads are read."""
        head_dim = info.shape[0] // num_heads
        first, last = start // head_dim, -(-stop // head_dim)
        rows = read(self.path, info, first * head_dim, last * head_dim)
        halves = rows.reshape(last - first, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        return halves[start - first * head_dim : stop - first * head_dim]
