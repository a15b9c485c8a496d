"""The host's memory and CPU features, from the kernel. No torch: front ends check them before a worker starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["Host", "process_usage", "resident_bytes"]

# bfloat16 multiplication instructions; without them values are converted one by one, slower than float32.
_BF16_FLAGS = frozenset(("amx_bf16", "avx512_bf16"))
_C_COMPILERS = ("cc", "gcc", "clang")


class Host:
    """proc, cgroups: mount points of these file systems."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The compute dtype on this CPU: `asked`, or for "auto" the checkpoint's where it is fast."""
        if asked != "auto":
            return asked
        return "bfloat16" if checkpoint == "bfloat16" and self._has_fast_bfloat16() else "float32"

    def processor(self) -> str:
        """Its model and instruction sets, as text: equal where code runs equally fast."""
        fields = self._cpu_fields()
        return " ".join((fields.get("model name", "unknown"), *sorted(fields.get("flags", "").split())))

    def _has_fast_bfloat16(self) -> bool:
        return not _BF16_FLAGS.isdisjoint(self._cpu_fields().get("flags", "").split())

    def _cpu_fields(self) -> dict[str, str]:
        """Of the first processor."""
        try:
            first, *_ = (self._proc / "cpuinfo").read_text().split("\n\n")
        except OSError:
            return {}
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}

    def c_compiler(self) -> str | None:
        """The path of the system's C compiler."""
        return next(filter(None, map(shutil.which, _C_COMPILERS)), None)

    def has_gpu(self) -> bool:
        """Whether an NVIDIA driver is loaded, or WSL's GPU device exists."""
        return (self._proc / "driver/nvidia/version").exists() or Path("/dev/dxg").exists()

    def total_memory_bytes(self) -> int:
        """The host's memory, or the limit of this process's cgroups if that is lower."""
        limits = [limit for limit, _ in self._cgroup_figures()]
        return min([int(psutil.virtual_memory().total), *limits])

    def free_memory_bytes(self) -> int:
        """The memory available within those limits; reclaimable page cache counts as available."""
        left = [max(0, limit - used) for limit, used in self._cgroup_figures()]
        return min([int(psutil.virtual_memory().available), *left])

    def _cgroup_figures(self) -> Iterator[tuple[int, int]]:
        """(limit, used) in bytes of this process's memory cgroup and its ancestors, where limited.

        `used` excludes page cache that the kernel reclaims before it refuses memory.
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


def process_usage() -> dict[str, float]:
    """This process's resident bytes, and its CPU seconds since its start over all threads."""
    return {"resident_bytes": resident_bytes(), "cpu_s": time.process_time()}


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(psutil.Process().memory_info().rss)
