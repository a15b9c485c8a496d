"""What the device can do at most, measured in the same run: a child process of the harness.

A decode step must read all weights and the KV cache: the ceiling is a kernel that does nothing but read. A prefill must
multiply: the ceiling is a large product, repeated for as long as the clocks need to settle under the load. What sleeps
and wakes up must copy: the ceiling is a large copy between the device and pinned memory of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.protocol import serve

__all__ = ["Ceilings"]

_READ_BYTES, _READS, _TRIES = 4 << 30, 10, 5
_GEMM_SIZE, _GEMMS = 8192, 200
_COPY_BYTES, _COPIES = 1 << 30, 4
_CPU_READ_BYTES, _CPU_GEMM_SIZE = 256 << 20, 1024  # to try a benchmark out where there is no GPU


@dataclass(frozen=True)
class Ceilings:
    read_bytes_per_s: float
    gemm_flops_per_s: float

    @classmethod
    def of(cls, reply: Mapping[str, float]) -> Ceilings:
        return cls(reply["read_bytes_per_s"], reply["gemm_flops_per_s"])


def measure(device: str, dtype: str) -> dict[str, float]:
    """Bytes a second read of the device's memory, and floating-point operations a second of products in `dtype`."""
    import torch

    return _on_cuda(torch.device(device), getattr(torch, dtype)) if device == "cuda" else _on_cpu(getattr(torch, dtype))


def _on_cuda(device: Any, dtype: Any) -> dict[str, float]:
    import torch

    from benchmarks.read_kernel import read_all, sums_for

    # Random, never zeros: the units save power on those, and the clocks are higher than a model's.
    source, sums = (
        torch.randint(-(1 << 31), 1 << 31, (_READ_BYTES // 4,), dtype=torch.int32, device=device),
        sums_for(device),
    )
    num_bytes = read_all(source, sums)
    read_s = min(_cuda_s(lambda: read_all(source, sums), _READS) for _ in range(_TRIES))
    a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    _cuda_s(lambda: torch.mm(a, b, out=out), _GEMMS // 10)
    gemm_s = _cuda_s(lambda: torch.mm(a, b, out=out), _GEMMS)
    return {"read_bytes_per_s": num_bytes / read_s, "gemm_flops_per_s": 2 * _GEMM_SIZE**3 / gemm_s}


def measure_copies(device: str) -> dict[str, float]:
    """Bytes a second from the device to the host, and back."""
    import torch

    if device != "cuda":
        source = torch.rand(_CPU_READ_BYTES // 4)
        out = torch.empty_like(source)
        rate = source.nbytes / _best_s(lambda: out.copy_(source))
        return {"to_host": rate, "to_device": rate}
    on_device = torch.randint(-(1 << 31), 1 << 31, (_COPY_BYTES // 4,), dtype=torch.int32, device=device)
    on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)

    def rate_of(out: Any, source: Any) -> float:
        seconds = [_cuda_s(lambda: out.copy_(source, non_blocking=True), _COPIES) for _ in range(_TRIES)]
        return float(_COPY_BYTES / min(seconds))

    return {"to_host": rate_of(on_host, on_device), "to_device": rate_of(on_device, on_host)}


def _cuda_s(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the device for one of `repeats` in a row."""
    import torch

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(repeats):
        action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / repeats


def _on_cpu(dtype: Any) -> dict[str, float]:
    import torch

    source = torch.rand(_CPU_READ_BYTES // 4)
    a, b = (torch.randn(_CPU_GEMM_SIZE, _CPU_GEMM_SIZE).to(dtype) for _ in range(2))
    return {
        "read_bytes_per_s": source.nbytes / _best_s(source.sum),
        "gemm_flops_per_s": 2 * _CPU_GEMM_SIZE**3 / _best_s(lambda: torch.mm(a, b)),
    }


def _best_s(action: Callable[[], object]) -> float:
    """Seconds of the host's clock, of the shortest of a few runs."""
    seconds = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


if __name__ == "__main__":
    serve({"measure": measure, "measure_copies": measure_copies})
