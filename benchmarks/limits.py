"""What this machine can do at most, measured in the same run: a child process of the harness.

A decode step reads every weight once and multiplies by each: the first is bounded by the rate of reading memory,
the second by the rate of a large float32 matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.peers.protocol import serve

BUFFER_BYTES = 1 << 30
GEMM_SIZE = 2048
REPEATS = 5


def main() -> None:
    import torch

    rows, columns = BUFFER_BYTES // 4 // 1024, 1024
    # Random numbers, never zeros: memory that was never written is one shared page, and some units save power on zeros.
    buffer = torch.rand(rows, columns)
    vector = torch.rand(columns)
    a, b = torch.rand(2, GEMM_SIZE, GEMM_SIZE)

    def measure() -> dict[str, float]:
        read_s = min(_best_s(buffer.sum), _best_s(lambda: torch.mv(buffer, vector)))
        gemm_s = _best_s(lambda: torch.mm(a, b))
        return {
            "read_bytes_per_s": buffer.nbytes / read_s,
            "gemm_flops_per_s": 2 * GEMM_SIZE**3 / gemm_s,
            "num_threads": torch.get_num_threads(),
        }

    serve({"measure": measure})


def _best_s(action: Callable[[], object]) -> float:
    """The shortest of a few runs: a limit is what the machine does when nothing disturbs it."""
    seconds = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


if __name__ == "__main__":
    main()
