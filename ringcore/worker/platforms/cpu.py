"""The host's processor and memory as a device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from ringcore.model_executor.parallel import TensorParallel
from ringcore.worker.arena import Arena
from ringcore.worker.communicator import GlooCommunicator
from ringcore.worker.device_memory import ArenaMemory, DeviceMemory, MemoryTag, PlainMemory
from ringcore.worker.platform import Platform
from ringcore.worker.platforms.host_memory import HostVirtualMemory, host_view

__all__ = ["CpuPlatform"]

# Instructions that multiply bfloat16; without them it is converted number by number, slower than float32.
_BF16_FLAGS = frozenset(("amx_bf16", "avx512_bf16"))


class CpuPlatform(Platform):
    """All ranks share one host; `proc` and `cgroups` are where the kernel tells about it. With enable_sleep_mode, the
    engine option, its memory comes from arenas."""

    device = torch.device("cpu")
    attention_backends: ClassVar[Sequence[str]] = ("torch_sdpa",)
    # Other programs live on the host, and the file cache that holds the checkpoint counts as free.
    default_memory_share: ClassVar[float] = 0.4
    attention_gathers: ClassVar[bool] = True

    def __init__(
        self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), enable_sleep_mode: bool = False
    ) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._memory: DeviceMemory = PlainMemory(self.device)
        if enable_sleep_mode:
            addresses = HostVirtualMemory(self.free_memory_bytes)
            self._memory = ArenaMemory(self.total_memory_bytes(), addresses, host_view)

    @classmethod
    def is_present(cls) -> bool:
        return True

    def connect(self, rank: int, size: int, rendezvous: str) -> TensorParallel:
        return GlooCommunicator(rank, size, rendezvous)

    def memory_budget_bytes(self, share: float, num_ranks: int) -> int:
        """An equal part of `share` of what is free: all ranks have the same memory."""
        return int(self.free_memory_bytes() * share / num_ranks)

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        if asked != "auto":
            return asked
        return "bfloat16" if checkpoint == "bfloat16" and self._has_fast_bfloat16() else "float32"

    def _has_fast_bfloat16(self) -> bool:
        try:
            lines = (self._proc / "cpuinfo").read_text().splitlines()
        except OSError:
            return False
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
        return not _BF16_FLAGS.isdisjoint(flags)

    def total_memory_bytes(self) -> int:
        limits = [limit for limit, _ in self._cgroup_figures()]
        return min([int(psutil.virtual_memory().total), *limits])

    def free_memory_bytes(self) -> int:
        left = [max(0, limit - used) for limit, used in self._cgroup_figures()]
        return min([int(psutil.virtual_memory().available), *left])

    def _cgroup_figures(self) -> Iterator[tuple[int, int]]:
        """(limit, used) in bytes of this process's memory control groups, its own and those above, where limited.

        What is used leaves out file pages that the kernel drops before it refuses memory.
        """
        for folder, limit_name, used_name, cache_name in self._cgroup_folders():
            try:
                limit = int((folder / limit_name).read_text())  # "max" is no limit
                used = int((folder / used_name).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            yield limit, used - int(stat.get(cache_name, 0))

    def _cgroup_folders(self) -> Iterator[tuple[Path, str, str, str]]:
        """Version 2 has one hierarchy ("0::/path"), version 1 one for memory ("5:memory:/path")."""
        try:
            lines = (self._proc / "self" / "cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, names = self._cgroups, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root = self._cgroups / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root):
                    yield folder, *names

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        """Pages are mapped, not filled: memory is taken, and cleared, as it is first written.

        torch's zeros touch everything at once. numpy's do not, but ask for huge pages, and then each block, which lies
        in as many places as a layer has heads, has 2 MiB cleared at every one of them; and they are not aligned.
        """
        if tag != "kv_cache" or isinstance(self._memory, ArenaMemory):
            return self._memory.allocate(num_bytes, tag)
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # gone with the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    @property
    def arenas(self) -> Mapping[str, Arena]:
        return self._memory.arenas

    def clear_new(self, memory: torch.Tensor) -> None:
        """New pages are zeros; to write them would take them."""

    def synchronize(self) -> None:
        """Every operation here has ended when it returns."""

    def close(self) -> None:
        self._memory.close()
