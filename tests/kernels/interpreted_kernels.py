"""Kernels whose results depend on what `interpreted_triton` replaces; run as a program, they print them."""

from __future__ import annotations

import hashlib
import json

import torch
import triton
import triton.language as tl


@triton.jit
def _weighted(a_sum, a_count, b_sum, b_count):
    """In another order the sum is rounded otherwise."""
    return a_sum * 0.7 + b_sum, tl.maximum(a_count, b_count) + 1


@triton.jit
def _scaled(x, factor):
    return tl.where(x > 0, x * factor, x - factor).to(tl.float32)


@triton.jit
def _kernel(x, sums, counts, out, rows: tl.constexpr, columns: tl.constexpr):
    i = tl.program_id(0)
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    at = (i * rows + row) * columns + column
    values = _scaled(tl.load(x + at, mask=column < columns - 3, other=1.5), i + 0.5)
    total, count = tl.reduce((values, (column + row * 0).to(tl.int32)), 1, _weighted)
    tl.store(sums + i * rows + tl.arange(0, rows), total)
    tl.store(counts + i * rows + tl.arange(0, rows), count)
    wrapped = (row + 2147483647) * (column + 3)  # of 32 bits
    largest = tl.max(values, 0)[None, :]
    cumulative = tl.cumsum(values, 1).to(tl.float16)
    tl.store(out + at, cumulative + largest + wrapped % 7)


@triton.jit
def _scalar_kernel(x, out, n):
    total, place = 0.0, 0
    for j in range(n):
        value = tl.load(x + j)
        if value > total:
            place = j
        total += value
    tl.store(out, total)
    tl.store(out + 1, place)


def results() -> list[torch.Tensor]:
    x = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(3))
    sums, counts, out, pair = (
        torch.zeros(6, 8),
        torch.zeros(6, 8, dtype=torch.int32),
        torch.zeros_like(x),
        torch.zeros(2),
    )
    _kernel[(6,)](x, sums, counts, out, rows=8, columns=16)
    _scalar_kernel[(1,)](x, pair, 40)
    halves = torch.zeros(6, 8, 16, dtype=torch.bfloat16)
    _kernel[(6,)](x.bfloat16(), sums[:], counts, halves, rows=8, columns=16)
    return [sums, counts, out, pair, halves]


def digests(tensors: list[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for tensor in tensors]


if __name__ == "__main__":
    print(json.dumps(digests(results())))
