"""A tensor in host memory without torch: the form of a torch tensor in processes that do not import torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["ITEMSIZES", "NUMPY_DTYPES", "HostTensor", "to_torch"]

MAX_DIMS = 64  # numpy's limit, and that of torch's kernels

_NUMPY_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
NUMPY_DTYPES = {name: np.dtype(name) for name in _NUMPY_BYTES}
# Bytes per element by dtype, named as in torch. Without the quantized dtypes, whose scale is not in the bytes.
ITEMSIZES = {
    **_NUMPY_BYTES,
    "bfloat16": 2,
    "complex32": 4,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    "bits16": 2,
}


class HostTensor:
    """The dtype, shape and bytes of a tensor, in host memory.

    `dtype` is the name in torch, without "torch."; `shape` a tuple of ints; the bytes are in row-major order and the
    host's byte order. Two are equal if all three are, bit by bit. `collective_rpc` returns it for a torch tensor; as an
    argument of `collective_rpc` it arrives in the worker's method as a torch tensor.
    """

    __slots__ = ("_bytes", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Copies `data`. Raises ValueError for an unknown dtype, and for a number of bytes that does not fit the
        shape."""
        self.dtype = dtype
        self.shape = tuple(shape)
        source = np.frombuffer(data, dtype=np.uint8)
        _check(dtype, self.shape, source.size)
        self._bytes = source.copy()  # [nbytes] uint8
        if dtype == "bool" and source.size and self._bytes.max() > 1:
            raise ValueError("an element of a bool tensor is neither 0 nor 1")

    @property
    def nbytes(self) -> int:
        return self._bytes.size

    @property
    def data(self) -> memoryview:
        """The raw bytes, one-dimensional."""
        return self._bytes.data

    def numpy(self) -> np.ndarray:
        """A numpy array that shares this memory. Raises TypeError for a dtype that numpy lacks (bfloat16, float8)."""
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise TypeError(f"numpy has no {self.dtype}; use torch(), or tolist()")
        return self._bytes.view(dtype).reshape(self.shape)

    def torch(self) -> Any:
        """A torch tensor that shares this memory. Imports torch.

        Raises TypeError if the installed torch is too old for the dtype.
        """
        torch = importlib.import_module("torch")
        dtype = vars(torch).get(self.dtype)
        if dtype is None:
            raise TypeError(f"torch {torch.__version__} has no {self.dtype}")
        if not self.nbytes:  # torch cannot view an empty tensor as another dtype
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self._bytes).view(dtype).reshape(self.shape)

    def tolist(self) -> Any:
        """The elements as nested lists, or one number if there is no dimension, as of a torch tensor.

        Imports torch for a dtype that numpy lacks, except bfloat16; raises torch's error for one without numbers
        (float4_e2m1fn_x2, bits8 ...).
        """
        if self.dtype in NUMPY_DTYPES:
            return self.numpy().tolist()
        if self.dtype == "bfloat16":  # the upper half of a float32
            wide = self._bytes.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape).tolist()
        return self.torch().tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostTensor):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and np.array_equal(self._bytes, other._bytes)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"HostTensor(dtype={self.dtype!r}, shape={self.shape})"


def _check(dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    """Raises ValueError unless a tensor of this dtype and shape has so many bytes."""
    itemsize = ITEMSIZES.get(dtype)
    if itemsize is None:
        raise ValueError(f"dtype {dtype[:40]!r} is unknown")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; at most {MAX_DIMS} are supported")
    if any(length < 0 for length in shape):
        raise ValueError(f"shape {shape} has a negative length")
    # Zeros count as 1, since the strides of an empty tensor are products of its lengths too.
    if math.prod(length or 1 for length in shape) * itemsize > np.iinfo(np.int64).max:
        raise ValueError(f"shape {shape} of {dtype} overflows")
    if math.prod(shape) * itemsize != num_bytes:
        raise ValueError(f"shape {shape} of {dtype} has {math.prod(shape) * itemsize} bytes, not {num_bytes}")


def to_torch(value: Any) -> Any:
    """Replaces each `HostTensor` by a torch tensor, at any depth of lists and dicts.

    Containers without one are returned unchanged.
    """
    match value:
        case HostTensor():
            return value.torch()
        case list() if _may_hold_tensors(value):
            return [to_torch(item) for item in value]
        case dict() if _may_hold_tensors(value.values()):
            return {key: to_torch(item) for key, item in value.items()}
    return value


def _may_hold_tensors(items: Any) -> bool:
    """By the items' types only, so that a list of a million numbers is cheap."""
    return not {HostTensor, list, dict}.isdisjoint(map(type, items))
