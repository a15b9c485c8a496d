"""Serializes numpy arrays and torch tensors as bytes, or refuses with the reason. Does not import torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from ringcore.protocol.host_tensor import ITEMSIZES, NUMPY_DTYPES

__all__ = ["bytes_of_array", "bytes_of_tensor", "torch_name"]

# Dtypes whose memory can be cast to bytes as it is: all but the complex ones.
_CASTABLE = frozenset(dtype for dtype in NUMPY_DTYPES.values() if dtype.kind != "c")


def torch_name(thing: Any) -> str:
    """A dtype or device of torch as text, e.g. "bfloat16", "cuda:0"."""
    return str(thing).removeprefix("torch.")


def bytes_of_array(array: np.ndarray) -> memoryview:
    """The elements in row-major and native byte order: [nbytes] uint8, a view if the memory is so already.

    Raises TypeError for elements other than numbers or bools.
    """
    if type(array) is np.ndarray and array.dtype in _CASTABLE and array.flags.c_contiguous and array.size:
        return array.data.cast("B")  # fast path, a tenth of the time
    kind = type(array).__name__
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(f"cannot send a {kind}: its mask would be lost; send .filled(), or .data and .mask")
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"cannot send a {kind} of dtype {array.dtype}: send numbers or bools, or .tolist()")
    flat = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C").reshape(-1)
    return flat.view(np.uint8).data


def bytes_of_tensor(tensor: Any, torch: ModuleType) -> memoryview:
    """The elements in row-major order: [nbytes] uint8, a view if host memory is so already.

    Raises TypeError for a tensor that its elements alone do not represent.
    """
    dtype = torch_name(tensor.dtype)
    obstacle = _obstacle(tensor, dtype, torch)
    if obstacle is not None:
        raise TypeError(f"cannot send {obstacle}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # Copied as integers: many small dtypes have no kernels, not even for a copy.
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(ITEMSIZES[dtype])
    if carrier is not None:
        tensor = tensor.view(carrier)
    # as_strided: a single element is contiguous with any stride, but not every stride can be viewed as bytes.
    flat = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
    raw: np.ndarray = flat.view(torch.uint8).numpy()
    return raw.data


def _obstacle(tensor: Any, dtype: str, torch: ModuleType) -> str | None:
    """Why this tensor cannot be sent, with a remedy; None if it can."""
    if tensor.is_nested:
        return "a nested tensor: send .unbind(), its parts"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: send .to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor: send .dequantize(), or .int_repr() and its scale"
    if tensor.is_meta:
        return "a meta tensor: it has no elements; send its shape and dtype"
    if dtype not in ITEMSIZES:
        return f"a tensor of {dtype}: send .view(torch.uint8), its bytes"
    return None
