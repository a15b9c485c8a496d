"""One GPU's use and the memory of one process on it, from the driver's management library (NVML)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["GpuMonitor", "process_bytes"]


def process_bytes(uuid: str, pid: int) -> int | None:
    """The memory of process `pid` on the GPU `uuid`, including the driver's, in bytes.

    uuid: with or without the prefix GPU- or MIG-; a MIG instance's uuid selects the instance.
    None where NVML is not installed, fails, does not report sizes, or does not list the process: in a container it may
    list the host's pids.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_find(pynvml, uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    own: list[int | None] = [process.usedGpuMemory for process in processes if process.pid == pid]
    known = [used for used in own if used is not None]
    return sum(known) if own and len(known) == len(own) else None


def _find(pynvml: Any, uuid: str) -> Any:
    """CUDA reports the bare UUID, NVML needs the prefix."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")


class GpuMonitor:
    """How busy one GPU is. NVML is loaded by the first call and stays for the life of the process: loading takes tens
    of milliseconds, a call after it a few. One thread at a time.

    find_uuid: returns the GPU's uuid.
    """

    def __init__(self, find_uuid: Callable[[], str]) -> None:
        self._find_uuid = find_uuid
        self._handle: Any = None
        self._is_missing = False

    def usage(self) -> dict[str, float]:
        """Percent of the time in which a kernel ran, memory used and total in bytes, power in watts: those that NVML
        knows of this GPU. Empty without NVML."""
        if self._is_missing:
            return {}
        try:
            import pynvml
        except ImportError:
            self._is_missing = True
            return {}
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = _find(pynvml, self._find_uuid())
        except pynvml.NVMLError:
            self._is_missing = True
            return {}
        figures: dict[str, float] = {}
        for read in (_percent, _memory, _power):
            try:
                figures |= read(pynvml, self._handle)
            except pynvml.NVMLError:  # a MIG instance has no utilization, some cards no power
                continue
        return figures


def _percent(pynvml: Any, handle: Any) -> dict[str, float]:
    return {"gpu_percent": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _memory(pynvml: Any, handle: Any) -> dict[str, float]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"gpu_used_bytes": int(memory.used), "gpu_total_bytes": int(memory.total)}


def _power(pynvml: Any, handle: Any) -> dict[str, float]:
    return {"gpu_power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}
