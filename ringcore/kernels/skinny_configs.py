"""Kernel choice and launch configuration of a skinny linear: a table of what was measured, and a rule for other shapes.

The table is of H200s, in CUDA graphs of dependent nodes, weights from memory, results added to float32. The rule
follows what the measured configurations have in common: one row takes 2 to 4 KiB of weights per warp, whole rows in
registers, and many programs of few warps; 5 to 32 rows take 64 weight rows as the M side of the tensor cores, and
split-K where there are few outputs; they prefetch the beginning of their weights before the previous kernel has ended.
2 to 4 rows are like one where the weight is small, else like more. More than 32 rows go to cuBLAS, with split-K where
`choose_split_k` says so. Its kernels start only when the one before has ended; for Qwen3-0.6B they take as long to
start as to read the weights, and with qkv and gate_up by `dot_kernel` whole passes of 40 to 256 rows took 1.4 to 6%
less.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["MAX_ROWS", "Config", "DotConfig", "FmaConfig", "choose", "choose_split_k"]


@dataclass(frozen=True, slots=True)
class FmaConfig:
    """Of `fma_kernel`, for up to 4 rows."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    trigger_late: bool = False  # issues its weight loads before the next kernel may start


@dataclass(frozen=True, slots=True)
class DotConfig:
    """Of `dot_kernel`."""

    block_weights: int
    block_inputs: int
    num_warps: int
    num_stages: int
    splits: int
    prefetched_inputs: int = 512  # inputs of each weight row that are prefetched to L2 before the wait
    block_rows: int = 64  # rows of one program at most


Config = FmaConfig | DotConfig

# Ends of the ranges of rows that share a configuration: 1, 2 to 4, 5 to 16 and so on. Within a range, a row's result is
# independent of the number of rows.
_RANGES = (1, 4, 16, 32, 64, 128, 192, 256)
MAX_ROWS = _RANGES[-1]
_MAX_FMA_ROWS = 4
_SMALL_WEIGHT = 1 << 22  # numbers
_MAX_SPLIT_K_ROWS = 256  # more rows were not measured in whole passes, where the norm reduces the partials
_MANY_WEIGHTS = 8192  # rows of a weight: with 64 per program, programs for nearly all SMs of an H200, or more

# (num_outputs, num_inputs, is_gated, end of the range): a gated weight has twice as many rows. None: cuBLAS.
_MEASURED: dict[tuple[int, int, bool, int], Config | None] = {
    # Qwen3-0.6B: qkv, o, gate_up, down, head
    (4096, 1024, False, 1): FmaConfig(2, 1024, 4),
    (4096, 1024, False, 4): DotConfig(64, 256, 4, 3, 1),
    (4096, 1024, False, 32): DotConfig(64, 256, 4, 3, 1),
    (4096, 1024, False, 64): DotConfig(64, 128, 4, 3, 1),
    (4096, 1024, False, 128): DotConfig(64, 128, 4, 3, 1, block_rows=128),
    (4096, 1024, False, 192): DotConfig(64, 128, 4, 3, 1, block_rows=128),
    (4096, 1024, False, 256): DotConfig(64, 128, 4, 3, 1, block_rows=128),
    (1024, 2048, False, 1): FmaConfig(2, 2048, 4),
    (1024, 2048, False, 4): FmaConfig(2, 2048, 4, trigger_late=True),
    (3072, 1024, True, 1): FmaConfig(8, 1024, 2),
    (3072, 1024, True, 64): DotConfig(128, 64, 8, 4, 1),
    (3072, 1024, True, 128): DotConfig(64, 128, 4, 3, 1, block_rows=128),
    (3072, 1024, True, 192): DotConfig(128, 64, 8, 4, 1, block_rows=128),
    (3072, 1024, True, 256): DotConfig(128, 64, 8, 4, 1, block_rows=128),
    (1024, 3072, False, 1): FmaConfig(2, 4096, 4),
    (1024, 3072, False, 4): FmaConfig(2, 2048, 4, trigger_late=True),
    (151936, 1024, False, 1): FmaConfig(4, 1024, 2),
    # Llama-3.2-1B
    (3072, 2048, False, 1): FmaConfig(4, 1024, 2),
    (2048, 2048, False, 1): FmaConfig(2, 2048, 4),
    (8192, 2048, True, 1): FmaConfig(2, 1024, 4),
    (2048, 8192, False, 1): FmaConfig(4, 2048, 2),
    (128256, 2048, False, 1): FmaConfig(2, 2048, 4),
    # Qwen3-8B
    (6144, 4096, False, 1): FmaConfig(4, 4096, 4),
    (4096, 4096, False, 1): FmaConfig(2, 4096, 8),
    (12288, 4096, True, 1): FmaConfig(1, 4096, 8),
    (12288, 4096, True, 4): DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0),
    (12288, 4096, True, 16): DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0),
    (12288, 4096, True, 32): DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0),
    (4096, 12288, False, 1): FmaConfig(4, 2048, 8),
    (151936, 4096, False, 1): FmaConfig(2, 4096, 8),
    # Qwen3-8B, one of two ranks
    (3072, 4096, False, 1): FmaConfig(4, 2048, 8),
    (4096, 2048, False, 1): FmaConfig(8, 2048, 2),
    (6144, 4096, True, 1): FmaConfig(2, 4096, 4),
    (4096, 6144, False, 1): FmaConfig(1, 4096, 8),
    (75968, 4096, False, 1): FmaConfig(4, 4096, 8),
}


@functools.cache
def choose(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
    """The configuration of x [num_rows, num_inputs] times a weight of num_outputs rows (gated: of twice as many).

    None: cuBLAS is faster, or there are no rows or too many.
    """
    if not 0 < num_rows <= MAX_ROWS:
        return None
    end = next(end for end in _RANGES if num_rows <= end)
    shape = (num_outputs, num_inputs, is_gated, end)
    return _MEASURED[shape] if shape in _MEASURED else _by_rule(*shape)


@functools.cache
def choose_split_k(num_outputs: int, num_inputs: int, num_rows: int) -> int:
    """The number of split-K splits, equal in size, of a cuBLAS product whose partials the next norm reduces.

    By itself cuBLAS computes few outputs in one pass over all inputs on few SMs, or with split-K and a reduction
    kernel. Microseconds on H200s of a product that is added to float32 rows, without splits, in 2 and in 4:

        | outputs x inputs | 128 rows         | 256              | 512              | 1,024               |
        | 4,096 x 12,288   | 34.3, 29.4, 31.3 | 44.3, 38.0, 39.8 | 68.9, 68.6, 72.0 | 132.0, 133.2, 140.7 |
        | 4,096 x 4,096    | 14.7, 13.1, 14.5 | 19.8, 18.0, 20.3 | 28.7, 28.7, 32.9 | 49.7, 50.5, 58.9    |
        | 2,048 x 8,192    | 16.9, 14.0, 12.0 | 22.6, 17.3, 15.9 | 31.5, 25.2, 27.1 | 46.7, 46.5, 49.8    |
        | 1,024 x 3,072    | 8.0, 6.1, 5.1    | 8.0, 6.2, 6.1    | 8.5, 8.0, 8.6    | 12.2, 12.1, 13.9    |
    """
    tiles = -(-num_rows // 128) * -(-num_outputs // 128)
    if num_rows > _MAX_SPLIT_K_ROWS or tiles > 64:
        return 1
    wanted = 4 if tiles <= 16 else 2
    return next((n for n in (wanted, 2) if num_inputs % (8 * n) == 0), 1)  # rows that begin at 16 bytes


def _by_rule(num_outputs: int, num_inputs: int, is_gated: bool, end: int) -> Config | None:
    num_weights = num_outputs * (2 if is_gated else 1)
    if end == 1 or (end == _MAX_FMA_ROWS and num_weights * num_inputs < _SMALL_WEIGHT):
        return _fma_by_rule(num_outputs, num_inputs, is_gated, end)
    return None if end > 32 else _dot_by_rule(num_weights, num_inputs)


def _dot_by_rule(num_weights: int, num_inputs: int) -> DotConfig:
    """Enough programs for nearly all SMs of an H200, each with two blocks of inputs or more."""
    if num_weights >= _MANY_WEIGHTS:
        return DotConfig(64, 128, 4, 3, 1)
    programs, blocks = -(-num_weights // 64), num_inputs // 256
    splits = next((n for n in (4, 2) if programs * n <= 132 and blocks >= 2 * n), 1)
    return DotConfig(64, 256, 4, 3, splits)


def _fma_by_rule(num_outputs: int, num_inputs: int, is_gated: bool, end: int) -> FmaConfig:
    width = 1 << (num_inputs - 1).bit_length()
    if width > 4096:  # more than fits in registers: a loop over blocks
        width = 4096 if end == 1 else 2048
    num_warps = min(8, max(1, width // 512))
    has_many = num_outputs >= 4096
    wide = end == 1 or width <= 2048
    block_outputs = 4 if has_many and wide and not (is_gated and num_inputs > 1024) else 2
    is_large = num_outputs * num_inputs * (2 if is_gated else 1) >= 1 << 23
    return FmaConfig(block_outputs, width, num_warps, trigger_late=is_large)
