"""Where weights and pages get their memory: from arenas, or from torch's own allocator."""

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
    """The large and long-lived memory of one device, by purpose."""

    @abstractmethod
    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """-> uint8 [num_bytes] at a multiple of 256 bytes; what it holds is not said.

        Raises `CapacityError` where the device has too little left.
        """

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """By tag; empty where the memory cannot be taken away."""
        return {}

    @property
    @abstractmethod
    def mapped_bytes(self) -> int:
        """What it has of the device beside torch's allocator."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it has; tensors of it must not be touched afterwards. Idempotent."""


class PlainMemory(DeviceMemory):
    """torch's allocator: memory goes back with the last tensor that looks at it."""

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
        """There is nothing that the tensors do not hold."""


class ArenaMemory(DeviceMemory):
    """An arena a tag, made when it is first asked for, each with addresses for all that the device has."""

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
