"""The tiles that can compute a skinny linear: which to time of a problem, and which are like another one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import triton

from ringcore.kernels.linears.found_tiles import TileProblem
from ringcore.kernels.linears.skinny_configs import MAX_ROWS
from ringcore.kernels.linears.skinny_tiles import (
    Config,
    DotConfig,
    FmaConfig,
    Int8GemvConfig,
    PackedFmaConfig,
    TmaConfig,
    padded_rows,
)
from ringcore.kernels.linears.skinny_times import DENSE_NUMBERS, H200, NUM_SMS, Numbers
from ringcore.kernels.linears.tma_configs import MAX_PROGRAMS, MAX_TMA_ROWS, with_deepest_ring
from ringcore.kernels.mixtures.experts_configs import grouped_tiles

__all__ = ["Kernel", "Linear", "block_rows", "can_run", "candidates", "first_kernels", "grouped_candidates", "near"]

Kernel = Config | None  # None: cuBLAS
_MAX_FMA_ROWS = 4
_MAX_SHARED_BYTES = 200 << 10  # of a program's tiles in flight
_MAX_RING_BYTES = 222 << 10  # of an SM's programs
_BYTES = 2  # of a number: skinny linears are 16-bit
_EXPANDED_ROWS = 32  # of more an expansion of packed weights before cuBLAS may be worth it
_FEW_ROWS = 8  # for which the model of times is fitted; for more it ranks tiles as for so many
_PREFETCHED_INPUTS = 512
_BESIDE_TMA = 2  # of those by the model of times


class Linear(Protocol):
    """x [num_rows, num_inputs] times a weight of num_outputs rows (gated: of twice as many)."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def is_gated(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...


def candidates(linear: Linear, kind: str, numbers: Numbers, chosen: Kernel, limit: int) -> list[Kernel]:
    """At most `limit`, `chosen` first. kind: "dense", "packed" or "rounded"."""
    found: list[Kernel] = [chosen]
    if kind == "dense":
        by_model = _by_model(linear) if linear.num_rows > 1 else []
        others = [kernel for kernel in first_kernels(linear, chosen) if kernel != chosen]
        around = near(chosen, linear) + [one for other in others for one in (other, *near(other, linear))]
        is_few = linear.num_rows <= _MAX_FMA_ROWS
        # Few rows: FMA and tensor cores by turns; more: those by the model, then what is near the choice. By TMA other
        # tiles are seldom slower than all of the model's.
        first = _BESIDE_TMA if isinstance(chosen, TmaConfig) else limit // 2
        found += [None, *(_by_turns(around, by_model) if is_few else [*by_model[:first], *around, *by_model])]
    elif chosen is not None:
        found += [None] if kind == "packed" and linear.num_rows > _EXPANDED_ROWS else []
        found += [one for one in near(chosen, linear, numbers) if _keeps_groups(one, chosen, kind)]
    return list(dict.fromkeys(found))[:limit]


def grouped_candidates(problem: TileProblem, chosen: Kernel, limit: int) -> list[Kernel]:
    """Of experts: at most `limit`, `chosen` first, then the fastest by the model of times."""
    num_experts, num_tokens = problem.num_experts, problem.max_rows
    num_weights = min(num_experts, num_tokens * problem.k) * problem.num_outputs
    tiles = grouped_tiles(num_experts, problem.num_inputs, num_tokens, problem.k, problem.numbers)
    few = min(num_tokens, _FEW_ROWS)
    tiles.sort(key=lambda tile: H200.seconds(tile, num_weights, problem.num_inputs, few, problem.numbers))
    return list(dict.fromkeys([chosen, *tiles]))[:limit]


def _by_turns(first: Iterable[Kernel], second: Iterable[Kernel]) -> list[Kernel]:
    left, right = list(first), list(second)
    longest = max(len(left), len(right))
    return [one for i in range(longest) for one in (*left[i : i + 1], *right[i : i + 1])]


def _keeps_groups(one: Kernel, chosen: Kernel, kind: str) -> bool:
    """Whether it divides inputs as `chosen` does, where scales do: whole groups are in a block."""
    have_blocks = DotConfig | PackedFmaConfig | TmaConfig
    if isinstance(one, have_blocks) and isinstance(chosen, have_blocks):
        return one.block_inputs == chosen.block_inputs or (kind == "packed" and one.block_inputs >= 64)
    return False


def _by_model(linear: Linear) -> list[Kernel]:
    """Tiles for tensor cores, the fastest by the model of times first."""
    num_weights = linear.num_outputs * (2 if linear.is_gated else 1)
    tiles: list[DotConfig] = []
    for block_weights in (64, 128):
        for block_inputs in (64, 128, 256):
            for num_stages in (3, 4):
                for splits in (1, 2, 3, 4, 6, 8):
                    is_one_wave = -(-num_weights // block_weights) * splits <= NUM_SMS
                    tile = DotConfig(
                        *(block_weights, block_inputs, block_weights // 16, num_stages, splits),
                        prefetched_inputs=_PREFETCHED_INPUTS if is_one_wave else 0,
                        block_rows=128 if linear.num_rows > 64 else 64,
                    )
                    if can_run(tile, linear) and (splits == 1 or 2 * splits * block_inputs <= linear.num_inputs):
                        tiles.append(tile)
    rows = min(linear.num_rows, _FEW_ROWS)
    return [*sorted(tiles, key=lambda tile: H200.seconds(tile, num_weights, linear.num_inputs, rows))]


def first_kernels(linear: Linear, chosen: Kernel) -> list[Kernel]:
    """Where a search of a dense weight begins. chosen: by the engine."""
    kernels: list[Kernel] = []
    if linear.num_rows <= _MAX_FMA_ROWS:
        width = min(4096 if linear.num_rows == 1 else 2048, 1 << (linear.num_inputs - 1).bit_length())
        kernels.append(FmaConfig(2, width, 4))
    if 1 < linear.num_rows <= MAX_ROWS:
        kernels.append(DotConfig(64, 128, 4, 3, 1))
    return list(dict.fromkeys([chosen, None, *(kernel for kernel in kernels if can_run(kernel, linear))]))


def near(kernel: Kernel, linear: Linear, numbers: Numbers = DENSE_NUMBERS) -> list[Kernel]:
    """Those that differ in one number, by a factor of 2; by TMA even ranges or splits too, and other tiles and numbers
    of programs."""
    found: list[Kernel] = []

    def vary(name: str, numbers: Iterable[int]) -> None:
        assert kernel is not None
        changes: list[dict[str, Any]] = [{name: number} for number in numbers]
        found.extend(replace(kernel, **change) for change in changes)

    match kernel:
        case FmaConfig():
            vary("block_outputs", _around(kernel.block_outputs, 1, 16))
            vary("block_inputs", _around(kernel.block_inputs, 256, 4096))
            vary("num_warps", _around(kernel.num_warps, 1, 8))
            found.append(replace(kernel, trigger_late=not kernel.trigger_late))
        case PackedFmaConfig():
            vary("block_outputs", _around(kernel.block_outputs, 1, 16))
            vary("num_warps", _around(kernel.num_warps, 1, 8))
            vary("num_programs", _around(kernel.num_programs, NUM_SMS, 8 * NUM_SMS))
            vary("block_inputs", _around(kernel.block_inputs, 512, 4096))
        case DotConfig():
            vary("block_weights", _around(kernel.block_weights, 32, 128))
            vary("block_inputs", _around(kernel.block_inputs, 32, 512))
            vary("num_warps", _around(kernel.num_warps, 4, 8))
            vary("num_stages", (n for n in (kernel.num_stages - 1, kernel.num_stages + 1) if n > 1))
            vary("splits", _around(kernel.splits, 1, 8))
            vary("prefetched_inputs", (0 if kernel.prefetched_inputs else _PREFETCHED_INPUTS,))
            vary("block_rows", _around(kernel.block_rows, 16, 128))
        case TmaConfig():
            vary("num_stages", (n for n in (kernel.num_stages - 1, kernel.num_stages - 2) if n > 2))
            if kernel.is_even:
                found += [replace(kernel, splits=splits, is_even=False) for splits in (2, 4)]
            else:
                found.append(replace(kernel, splits=1, is_even=True))
                vary("splits", _around(kernel.splits, 1, 8))
            found += _rings(kernel, linear, numbers)
    return [one for one in found if can_run(one, linear, numbers)]


def _rings(kernel: TmaConfig, linear: Linear, numbers: Numbers) -> Iterator[TmaConfig]:
    """Other tiles with the deepest ring, by any number of programs that all have one: first by as many, or one less."""
    weights = linear.num_outputs * (2 if linear.is_gated else 1)
    by_distance = sorted(range(1, MAX_PROGRAMS + 1), key=lambda n: abs(n - kernel.programs_per_sm + 0.5))
    for programs, block_weights, block_inputs in itertools.product(by_distance, (64, 128), (128, 64)):
        if triton.cdiv(weights, block_weights) * kernel.splits > (programs - 1) * NUM_SMS:
            tile: dict[str, Any] = {
                "block_weights": block_weights,
                "block_inputs": block_inputs,
                "programs_per_sm": programs,
            }
            found = with_deepest_ring(replace(kernel, **tile), linear.num_rows, int(numbers.bytes))
            if found not in (None, kernel):
                yield found


def _around(number: int, low: int, high: int) -> list[int]:
    return [n for n in (number // 2, number * 2) if low <= n <= high]


def can_run(kernel: Kernel, linear: Linear, numbers: Numbers = DENSE_NUMBERS) -> bool:
    match kernel:
        case None:
            return True
        case FmaConfig():
            width = 1 << (linear.num_inputs - 1).bit_length()
            return linear.num_rows <= _MAX_FMA_ROWS and kernel.block_inputs <= max(width, 256)
        case PackedFmaConfig():
            return linear.num_rows <= 2
        case Int8GemvConfig():  # of all products of a model or of none, so it is not for a search
            return False
        case DotConfig():
            block_outputs = kernel.block_weights // (2 if linear.is_gated else 1)
            input_bytes = kernel.block_weights * numbers.bytes + block_rows(kernel, linear) * _BYTES
            return (
                16 <= block_outputs <= 32 * kernel.num_warps
                and linear.num_rows <= 4 * kernel.block_rows
                and kernel.block_inputs * kernel.splits <= linear.num_inputs
                and input_bytes * kernel.block_inputs * kernel.num_stages <= _MAX_SHARED_BYTES
            )
        case TmaConfig():
            # Rows are stored as weights are: both in 16 bits, or both in FP8.
            stage_bytes = (kernel.block_weights + padded_rows(linear.num_rows)) * kernel.block_inputs * numbers.bytes
            return (
                1 < linear.num_rows <= MAX_TMA_ROWS
                and linear.num_inputs % (kernel.block_inputs * kernel.splits) == 0
                and kernel.programs_per_sm * stage_bytes * kernel.num_stages <= _MAX_RING_BYTES
            )


def block_rows(kernel: DotConfig, linear: Linear) -> int:
    """Of a program."""
    rows = min(linear.num_rows, kernel.block_rows)
    return max(16, 1 << (rows - 1).bit_length())
