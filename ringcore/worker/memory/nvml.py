"""The memory of one process on one GPU, from the driver's management library (NVML)."""

from __future__ import annotations

from typing import Any

__all__ = ["process_bytes"]


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
