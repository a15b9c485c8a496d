"""The host's processor and memory as a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from ringcore.distributed.communicator import GlooCommunicator
from ringcore.distributed.parallel import Stage, TensorParallel
from ringcore.distributed.pipeline import GlooLink, StageLink
from ringcore.distributed.rendezvous import Rendezvous
from ringcore.errors import CapacityError, ConfigError
from ringcore.host.byte_sizes import format_bytes
from ringcore.host.resources import Host
from ringcore.model_executor.linear_schemes.cpu_packing import is_bfloat16_faster
from ringcore.worker.memory.arena import Arena
from ringcore.worker.memory.device_memory import ArenaMemory, DeviceMemory, MemoryTag, PlainMemory
from ringcore.worker.memory.host_memory import HostVirtualMemory, host_view
from ringcore.worker.platforms.platform import Platform

__all__ = ["CpuPlatform"]


class CpuPlatform(Platform):
    """All ranks share one host. proc, cgroups: the kernel's file systems that describe it. With the engine option
    enable_sleep_mode, memory is allocated from arenas."""

    device = torch.device("cpu")
    attention_backends: ClassVar[Sequence[str]] = ("cpu_attn", "torch_sdpa", "torch_mla")
    # Of the memory available after the weights are loaded. A quarter is left for the rest of the host: other programs
    # grow, this engine's other processes need some, and the page cache counts as available, though without it every
    # file is read from disk again.
    default_memory_share: ClassVar[float] = 0.75
    attention_gathers: ClassVar[bool] = True

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        enable_sleep_mode: bool = False,
        is_bfloat16_faster: Callable[[], bool] = is_bfloat16_faster,
    ) -> None:
        self._host = Host(proc, cgroups)
        self._is_bfloat16_faster = is_bfloat16_faster
        self._memory: DeviceMemory = PlainMemory(self.device)
        if enable_sleep_mode:
            addresses = HostVirtualMemory(self.free_memory_bytes)
            self._memory = ArenaMemory(self.total_memory_bytes(), addresses, host_view)

    @classmethod
    def is_present(cls) -> bool:
        return True

    @classmethod
    def open(cls, rank: int, device_memory: str, enable_sleep_mode: bool) -> CpuPlatform:
        if device_memory == "arena" and not enable_sleep_mode:
            raise ConfigError(
                "device_memory='arena': a CPU has no arenas without enable_sleep_mode=True; give 'auto' or 'plain'",
                option="device_memory",
                value="arena",
            )
        return cls(enable_sleep_mode=enable_sleep_mode)

    def connect(self, rank: int, size: int, rendezvous: Rendezvous, name: str, one_host: bool) -> TensorParallel:
        return GlooCommunicator(rank, size, rendezvous, name)

    def link(self, stage: Stage, rendezvous: Rendezvous, name: str) -> StageLink:
        return GlooLink(stage, rendezvous, name)

    def shared_memory_bytes(self, num_ranks: int) -> int:
        """An equal share of the free memory: all ranks share the host's."""
        return self.free_memory_bytes() // num_ranks

    def memory_budget_bytes(self, asked_bytes: int) -> int:
        return asked_bytes

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """By the processor's instructions; for "auto" bfloat16 must also be measured faster."""
        dtype = self._host.resolve_dtype(asked, checkpoint)
        is_slower = asked == "auto" and dtype == "bfloat16" and not self._is_bfloat16_faster()
        return "float32" if is_slower else dtype

    def total_memory_bytes(self) -> int:
        return self._host.total_memory_bytes()

    def free_memory_bytes(self) -> int:
        return self._host.free_memory_bytes()

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """Maps the KV cache without touching it: pages are allocated, and cleared, on first write.

        torch.zeros touches all memory at once. np.zeros does not, but requests huge pages: a block, which is scattered
        over as many places as a layer has heads, would clear 2 MiB at each of them; and np.zeros is not aligned.
        """
        if tag != "kv_cache" or isinstance(self._memory, ArenaMemory):
            return self._memory.allocate(num_bytes, tag)
        try:
            # Unmapped with the last tensor that views it.
            memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # a limit of the process, or a kernel that does not overcommit
            raise CapacityError(
                f"{tag}: {format_bytes(num_bytes, exact=True)} asked: {error.strerror}; lower "
                "gpu_memory_utilization or kv_cache_bytes, or raise the limit on this process's memory (ulimit -v)",
                needed_bytes=num_bytes,
            ) from error
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    @property
    def arenas(self) -> Mapping[str, Arena]:
        return self._memory.arenas

    def clear_new(self, memory: torch.Tensor) -> None:
        """A no-op: new pages are zeros, and writing them would allocate them."""

    def synchronize(self) -> None:
        """A no-op: every operation is synchronous."""

    def close(self) -> None:
        self._memory.close()
