"""The seam between a worker and the kind of device it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.worker.memory.arena import Arena
from ringcore.worker.memory.device_memory import MemoryTag
from ringcore.worker.memory.host_link import HostLink, LocalLink

__all__ = ["Platform", "ProcessMemory"]


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What one process has of a device, in bytes. Others on the device are no part of it, where the driver tells."""

    own_bytes: int  # all of it
    torch_bytes: int  # of that, what torch's allocator holds, used or not
    arena_bytes: int  # and what is mapped into arenas

    @property
    def non_torch_bytes(self) -> int:
        """The driver's share: context, kernels' code, communication buffers, instantiated graphs."""
        return max(0, self.own_bytes - self.torch_bytes - self.arena_bytes)


class Platform(ABC):
    """One device, as the worker uses it: its number formats, its memory, its order of attention backends."""

    device: torch.device
    attention_backends: ClassVar[Sequence[str]]  # for attention_backend="auto", the best first
    default_memory_share: ClassVar[float]  # of `shared_memory_bytes`, where the user gave no gpu_memory_utilization
    attention_gathers: ClassVar[bool]  # whether its backends copy pages together
    measures_steps: ClassVar[bool] = False  # whether a step is run, to see what it takes, before there are pages

    @classmethod
    @abstractmethod
    def is_present(cls) -> bool:
        """Whether this host has such a device."""

    @abstractmethod
    def connect(self, rank: int, size: int, rendezvous: str) -> TensorParallel:
        """Meets the other ranks through the file `rendezvous`. Raises RuntimeError where one is absent."""

    @abstractmethod
    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The dtype to compute in: `asked`, or for "auto" the checkpoint's where the device is fast at it."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """What this device has, or this process's limit if that is lower."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """What can be allocated now without taking it from anybody."""

    @abstractmethod
    def shared_memory_bytes(self, num_ranks: int) -> int:
        """What gpu_memory_utilization is a share of, for this rank, one of `num_ranks` of the host."""

    @abstractmethod
    def memory_budget_bytes(self, asked_bytes: int) -> int:
        """What this rank may still take, where it asks for so much of `shared_memory_bytes`; negative where its process
        has more than that already."""

    @abstractmethod
    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """-> uint8 [num_bytes] for what lives as long as the engine, at a multiple of 256 bytes.

        "kv_cache" is zero-filled: what a page holds before its first token must be finite. What "weights" holds is not
        said. Raises `CapacityError` where the device has too little left.
        """

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """What `allocate` takes from, by tag; empty where that is torch's allocator, which keeps what it has."""
        return {}

    def clear_new(self, memory: torch.Tensor) -> None:
        """Fills memory that was mapped just now with zeros; they may be there only after `synchronize`."""
        memory.zero_()

    def release_cached(self) -> int:
        """Gives back what the device's allocators hold and do not use; -> bytes."""
        return 0

    def host_link(self) -> HostLink:
        """-> what copies between this device's memory and the host's."""
        return LocalLink()

    def process_memory(self) -> ProcessMemory | None:
        """What this process has of the device now; None where that is not told apart."""
        return None

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Runs `run`; -> the most that torch took from the device meanwhile, beside what it had before.

        Asked only where `measures_steps`. Raises torch's OutOfMemoryError where it is too much.
        """
        raise RuntimeError(f"memory of a step is not measured on {self.device}")

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has done all it was given."""

    def close(self) -> None:  # noqa: B027  memory of a host goes with the tensors
        """Gives back the memory of `allocate`, whose tensors must not be touched afterwards, and what is cached.
        Idempotent."""
