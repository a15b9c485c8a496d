"""The allocators of weights and KV cache: arenas, or torch's own allocator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.arena import ALIGNMENT, Arena, TensorView, VirtualMemory

__all__ = ["ArenaMemory", "DeviceMemory", "MemoryTag", "PlainMemory"]

MemoryTag = Literal["weights", "kv_cache"]


class DeviceMemory(ABC):
    """Allocates the large, long-lived memory of one device, by tag."""

    @abstractmethod
    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """-> uninitialized uint8 [num_bytes] at a multiple of 256 bytes.

        Raises `CapacityError` where the device lacks memory.
        """

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """By tag; empty where the memory cannot be unmapped."""
        return {}

    @property
    @abstractmethod
    def mapped_bytes(self) -> int:
        """Device memory in use outside torch's allocator."""

    @abstractmethod
    def close(self) -> None:
        """Frees its memory; its tensors must not be accessed afterwards. Idempotent."""


class PlainMemory(DeviceMemory):
    """torch's allocator: memory is freed with the last tensor that views it."""

    mapped_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        try:
            memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{tag}: {format_bytes(num_bytes)} asked: {error}", needed_bytes=num_bytes) from error
        begin = -memory.data_ptr() % ALIGNMENT
        return memory[begin : begin + num_bytes]

    def close(self) -> None:
        """Nothing to free: the tensors own the memory."""


class ArenaMemory(DeviceMemory):
    """One arena per tag, created at its first allocation, with addresses for the device's whole memory."""

    def __init__(self, capacity: int, memory: VirtualMemory, view: TensorView) -> None:
        self._capacity, self._memory, self._view = capacity, memory, view
        self._arenas: dict[str, Arena] = {}

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """By tag."""
        return self._arenas

    @property
    def mapped_bytes(self) -> int:
        return sum(arena.mapped_bytes for arena in self._arenas.values())

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        if tag not in self._arenas:
            self._arenas[tag] = Arena(tag, self._capacity, self._memory, self._view)
        return self._arenas[tag].allocate(num_bytes)

    def close(self) -> None:
        arenas, self._arenas = self._arenas, {}
        for arena in arenas.values():
            arena.close()
