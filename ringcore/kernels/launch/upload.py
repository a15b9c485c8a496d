"""Asynchronous H2D copies of numpy arrays, from pinned host memory on the current stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["upload", "upload_packed"]

_ALIGNMENT = 4  # words of 32 bits: Triton recompiles a kernel for a pointer that is not aligned to 16 bytes


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`. The host does not wait; torch reuses the pinned memory once the copy has ended. On a CPU the
    tensor shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_packed(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of 32-bit numbers as tensors of their shapes and dtypes, in one H2D copy.

    Each starts at a multiple of 16 bytes, and is followed by at least one word where it is empty, so that it has an
    address.
    """
    sizes = [-(-max(1, array.size) // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[at : at + array.size] = array.reshape(-1).view(np.int32)
        at += size
    pieces = torch.split(upload(packed, device), sizes)
    return [
        piece[: array.size].view(torch.float32 if array.dtype == np.float32 else torch.int32).view(array.shape)
        for piece, array in zip(pieces, arrays, strict=True)
    ]
