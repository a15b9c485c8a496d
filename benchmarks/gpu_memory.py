"""What the driver says is in use of the GPUs' memory, by NVIDIA's tool: of all processes, and of some."""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.machine import ask_nvidia_smi

__all__ = ["device_used_bytes", "process_used_bytes"]

_MIB = 1 << 20  # its unit
_FORM = "csv,noheader,nounits"


def device_used_bytes() -> int | None:
    """Of all GPUs together that CUDA may use here. None where the driver does not tell."""
    return _total(ask_nvidia_smi("--query-gpu=memory.used", _FORM))


def process_used_bytes(pids: Collection[int]) -> int | None:
    """Of these processes together, on all GPUs. None where the driver does not tell: in a container it may list the
    host's numbers."""
    lines = [line.split(", ") for line in ask_nvidia_smi("--query-compute-apps=pid,used_memory", _FORM)]
    return _total([used for pid, used in lines if int(pid) in pids])


def _total(mib: Collection[str]) -> int | None:
    return sum(map(int, mib)) * _MIB if mib and all(number.isdecimal() for number in mib) else None
