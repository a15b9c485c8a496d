"""The interface between a worker and its kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ringcore.distributed.parallel import Stage, TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.distributed.rendezvous import Rendezvous
from ringcore.worker.memory.arena import Arena
from ringcore.worker.memory.block_link import BlockLink, LocalBlockLink
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.memory.device_memory import MemoryTag
from ringcore.worker.memory.host_link import HostLink, LocalLink

__all__ = ["Platform", "ProcessMemory"]


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process's device memory in bytes; without other processes' memory where the driver can attribute it."""

    own_bytes: int  # all of it
    torch_bytes: int  # of that, reserved by torch's allocator
    arena_bytes: int  # of that, mapped into arenas

    @property
    def non_torch_bytes(self) -> int:
        """The driver's share: context, kernels' code, communication buffers, instantiated graphs."""
        return max(0, self.own_bytes - self.torch_bytes - self.arena_bytes)


class Platform(ABC):
    """One device, as the worker uses it: its number formats, its memory, its order of attention backends."""

    device: torch.device
    attention_backends: ClassVar[Sequence[str]]  # for attention_backend="auto", the best first
    default_memory_share: ClassVar[float]  # of `shared_memory_bytes`, where the user gave no gpu_memory_utilization
    attention_gathers: ClassVar[bool]  # whether its backends gather pages into a copy
    measures_steps: ClassVar[bool] = False  # whether a profile run measures steps before the KV cache is allocated

    @classmethod
    @abstractmethod
    def is_present(cls) -> bool:
        """Whether this host has such a device."""

    @classmethod
    @abstractmethod
    def open(cls, rank: int, device_memory: str, enable_sleep_mode: bool) -> Platform:
        """The device of a worker. rank: among those of the host. device_memory, enable_sleep_mode: the engine options.
        Raises `ConfigError` where the device cannot do what they ask, or there is none for the rank."""

    @abstractmethod
    def connect(self, rank: int, size: int, rendezvous: Rendezvous, name: str, one_host: bool) -> TensorParallel:
        """Joins the process group of a stage's ranks, of this name. one_host: whether all of them share a host. Raises
        RuntimeError where a rank is missing."""

    @abstractmethod
    def link(self, stage: Stage, rendezvous: Rendezvous, name: str) -> StageLink:
        """Joins the group of the ranks of one number in all stages of a pipeline, as `connect`."""

    @abstractmethod
    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The dtype to compute in: `asked`, or for "auto" the checkpoint's where the device is fast at it."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """The device's memory, or this process's limit if that is lower."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """What can be allocated now."""

    @abstractmethod
    def shared_memory_bytes(self, num_ranks: int) -> int:
        """The memory of which gpu_memory_utilization is a share, for this rank, one of `num_ranks` of the host."""

    @abstractmethod
    def memory_budget_bytes(self, asked_bytes: int) -> int:
        """What this rank may still allocate if its share is `asked_bytes`; negative if it already uses more."""

    @abstractmethod
    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """-> uint8 [num_bytes] for the life of the engine, at a multiple of 256 bytes.

        "kv_cache" is zero-filled: attention needs finite values in unwritten slots. "weights" is uninitialized. Raises
        `CapacityError` where the device lacks memory.
        """

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """The arenas of `allocate`, by tag; empty with torch's allocator, whose memory cannot be unmapped."""
        return {}

    def clear_new(self, memory: torch.Tensor) -> None:
        """Zero-fills newly mapped memory; asynchronous until `synchronize`."""
        memory.zero_()

    def release_cached(self) -> int:
        """Returns the allocators' cached free memory to the device; -> bytes."""
        return 0

    def host_link(self) -> HostLink:
        """-> the copies between device and host memory."""
        return LocalLink()

    def block_link(self, pages: BlockPages) -> BlockLink:
        """-> the copies of blocks between the device's pages and host memory."""
        return LocalBlockLink(pages)

    def process_memory(self) -> ProcessMemory | None:
        """This process's device memory now; None where it is not known."""
        return None

    def usage(self) -> dict[str, float]:
        """How busy the device is, for operators: "gpu_percent", "gpu_used_bytes", "gpu_total_bytes", "gpu_power_w", as
        far as they are known. Called on the side thread."""
        return {}

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Runs `run`; -> the peak of the memory that torch reserved meanwhile, beyond what it had before.

        Called only where `measures_steps`. Raises torch's OutOfMemoryError.
        """
        raise RuntimeError(f"memory of a step is not measured on {self.device}")

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work on the device."""

    def close(self) -> None:  # noqa: B027  memory of a host goes with the tensors
        """Frees the memory of `allocate`, whose tensors must not be accessed afterwards, and cached memory.
        Idempotent."""
