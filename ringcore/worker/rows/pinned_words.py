"""Pinned host memory that kernels read in place, over the bus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["PinnedWords"]

_BUFFERS = 8  # more than the steps in flight
_MIN_WORDS = 1 << 14


@dataclass(slots=True)
class _Buffer:
    words: torch.Tensor  # [2, capacity] int32, pinned
    read: torch.cuda.Event | None = None  # recorded after the kernel that reads the buffer


class PinnedWords:
    """Pairs of int32 arrays in pinned host memory that a kernel reads in place. A pool of buffers: one is reused only
    after its event shows that the kernel that reads it has finished."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = [self._allocate(_MIN_WORDS) for _ in range(_BUFFERS)]
        self._next = 0

    def _allocate(self, capacity: int) -> _Buffer:
        return _Buffer(torch.empty(2, capacity, dtype=torch.int32, pin_memory=self._on_gpu))

    @contextmanager
    def filled(self, first: np.ndarray, second: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """[n] int32 each. Kernels launched in the context, on the current stream, may read the two tensors [>= n]."""
        buffer = self._buffers[self._next]
        if buffer.read is not None:
            buffer.read.synchronize()
        if buffer.words.shape[1] < len(first):
            buffer = self._buffers[self._next] = self._allocate(1 << len(first).bit_length())
        self._next = (self._next + 1) % _BUFFERS
        for row, array in zip(buffer.words, (first, second), strict=True):
            row.numpy()[: len(array)] = array
        yield buffer.words[0], buffer.words[1]
        if self._on_gpu:
            buffer.read = buffer.read or torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.read.record()
