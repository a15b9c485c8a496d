"""Serializes numpy arrays and torch tensors to raw bytes, zero-copy where the layout allows. Does not import torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from ringcore.protocol.host_tensor import ITEMSIZES, NUMPY_DTYPES

__all__ = ["bytes_of_array", "bytes_of_tensor", "torch_name"]

# Dtypes whose buffer can be cast to bytes without a copy: all supported ones but the complex ones.
_CASTABLE = frozenset(dtype for dtype in NUMPY_DTYPES.values() if dtype.kind != "c")


def torch_name(thing: Any) -> str:
    """A dtype or device of torch as text, e.g. "bfloat16", "cuda:0"."""
    return str(thing).removeprefix("torch.")


def bytes_of_array(array: np.ndarray) -> memoryview:
    """The elements in row-major and native byte order: [nbytes] uint8, a view of a contiguous array, else a copy.

    Raises TypeError for arrays of other than numbers or bools.
    """
    if type(array) is np.ndarray and array.dtype in _CASTABLE and array.flags.c_contiguous and array.size:
        return array.data.cast("B")  # the common case, in a tenth of the time of the general path
    kind = type(array).__name__
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(f"cannot send a {kind}: its mask would be lost; send .filled(), or .data and .mask")
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"cannot send a {kind} of dtype {array.dtype}: send numbers or bools, or .tolist()")
    flat = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C").reshape(-1)
    return flat.view(np.uint8).data


def bytes_of_tensor(tensor: Any, torch: ModuleType) -> memoryview:
    """The elements in row-major order: [nbytes] uint8, a view of a contiguous host tensor, else a copy.

    Raises TypeError for a tensor that dense elements do not describe (nested, sparse, quantized, meta).
    """
    dtype = torch_name(tensor.dtype)
    obstacle = _obstacle(tensor, dtype, torch)
    if obstacle is not None:
        raise TypeError(f"cannot send {obstacle}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # Copied as integers of the same size: many small dtypes have no kernels, not even a copy.
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(ITEMSIZES[dtype])
    if carrier is not None:
        tensor = tensor.view(carrier)
    # Explicit stride 1: a single element is contiguous with any stride, but view(uint8) needs stride 1.
    flat = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
    raw: np.ndarray = flat.view(torch.uint8).numpy()
    return raw.data


def _obstacle(tensor: Any, dtype: str, torch: ModuleType) -> str | None:
    """Why this tensor cannot be sent, with a remedy; None if it can be."""
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
