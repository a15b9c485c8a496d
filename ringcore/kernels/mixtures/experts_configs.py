"""Tiles of the grouped products of a mixture of experts.

Up to `MAX_FEW_TOKENS` tokens a tile has twice the mean number of rows of an expert: nearly every expert with a token is
one work item a tile of outputs, whose weights are read once, and the items of an expert with more share them in the L2.
As in a skinny linear the time is that of reading weights, and the tile is the one which the model of `skinny_times`
finds fastest, for as many experts as the tokens can have. With more tokens the tile is that of a dense product, and its
rows follow the mean number of rows of an expert. What was measured (`experts_measured`) goes before both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from ringcore.kernels.linears.skinny_configs import many_packed
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import (
    DENSE_NUMBERS,
    E2M1_NUMBERS,
    FP8_NUMBERS,
    NIBBLE_NUMBERS,
    Numbers,
    fastest_dot,
)
from ringcore.kernels.mixtures.experts_measured import MEASURED, MEASURED_E2M1, MEASURED_FP8

__all__ = [
    "FLOAT32_TILE",
    "MAX_FEW_TOKENS",
    "MAX_LISTED_PAIRS",
    "MAX_LISTED_TOKENS",
    "MAX_PAIRED_TOKENS",
    "MAX_SUMMED_TOKENS",
    "choose_grouped",
    "fitted",
    "grouped_tiles",
    "rows_of_item",
]

MAX_FEW_TOKENS = 64
# For more, the weighted sum has a launch of its own: the last program of a tile takes a trip to the L2 cache a token.
MAX_SUMMED_TOKENS = 4
# Without a sort: the weights of an expert that several of so few tokens have are read again, mostly from the L2 cache.
MAX_PAIRED_TOKENS = 4
# With a list of work items; the tiles of more are so long that a search for their pairs does not show.
MAX_LISTED_TOKENS, MAX_LISTED_PAIRS = 256, 2048
MIN_ROWS, _MAX_ROWS, _MOST_ROWS = 16, 128, 256
FLOAT32_TILE = DotConfig(32, 32, 4, 2, 1)
_MOST_SUMS = 1 << 15  # of a tile, in registers
# Weights, inputs, warps and stages of tiles to time.
_FEW = ((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 2), (64, 256, 4, 3), (64, 64, 4, 6))
_WIDE = (
    (128, 64, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
    (128, 128, 4, 3),
    (128, 128, 8, 2),
    (256, 64, 8, 3),
)


@functools.cache
def choose_grouped(
    num_experts: int,
    num_weights: int,
    num_inputs: int,
    num_tokens: int,
    k: int,
    dtype: torch.dtype,
    numbers: Numbers = DENSE_NUMBERS,
) -> DotConfig:
    """Of num_tokens tokens with k of num_experts experts each; `block_rows` is the rows of a work item."""
    is_packed = numbers != DENSE_NUMBERS
    tables = {DENSE_NUMBERS: MEASURED, FP8_NUMBERS: MEASURED_FP8, E2M1_NUMBERS: MEASURED_E2M1}
    measured = tables.get(numbers, {}).get((num_experts, k, num_weights, num_inputs), {})
    if dtype != torch.float32 and (up_to := min((limit for limit in measured if limit >= num_tokens), default=0)):
        return measured[up_to]
    if num_tokens <= MAX_FEW_TOKENS:
        block_rows = max(MIN_ROWS, min(_power_of_2(num_tokens), rows_of_item(num_experts, num_tokens, k)))
        num_active = min(num_experts, num_tokens * k)
        config = fastest_dot(num_active * num_weights, num_inputs, block_rows, (1,), numbers)
    else:
        block_rows = min(_MAX_ROWS, max(2 * MIN_ROWS, rows_of_item(num_experts, num_tokens, k)))
        config = many_packed(numbers) if is_packed else DotConfig(128, 64, 8, 4, 1)
        block_rows = min(block_rows, config.block_rows) if is_packed else block_rows
    if dtype == torch.float32:  # without tensor cores; a number has twice the bytes of those of the model of times
        config, block_rows = FLOAT32_TILE, min(block_rows, MAX_FEW_TOKENS)
    return fitted(config, block_rows, num_inputs, numbers)


def rows_of_item(num_experts: int, num_tokens: int, k: int) -> int:
    """Twice the mean rows of an expert for few tokens, else the mean: the next power of 2."""
    return _power_of_2((2 if num_tokens <= MAX_FEW_TOKENS else 1) * num_tokens * k // num_experts)


def fitted(config: DotConfig, block_rows: int, num_inputs: int, numbers: Numbers) -> DotConfig:
    """The tile with block_rows rows, whose blocks of inputs suit the weight."""
    # Of 4 bits a block is four products, and has whole runs.
    least = {NIBBLE_NUMBERS: 128, E2M1_NUMBERS: 64}.get(numbers, 16)
    most = {FP8_NUMBERS: 128}.get(numbers, config.block_inputs)  # in one group
    block_inputs = max(least, min(most, config.block_inputs, _power_of_2(num_inputs)))
    return DotConfig(config.block_weights, block_inputs, config.num_warps, config.num_stages, 1, block_rows=block_rows)


def grouped_tiles(
    num_experts: int, num_inputs: int, num_tokens: int, k: int, numbers: Numbers = DENSE_NUMBERS
) -> list[DotConfig]:
    """Those to time for num_tokens tokens with k of num_experts experts each."""
    if num_tokens <= MAX_FEW_TOKENS:
        most_rows = max(MIN_ROWS, _power_of_2(num_tokens))
        rows = sorted({most_rows, max(MIN_ROWS, most_rows // 4)})
    else:
        mean = min(_MOST_ROWS, num_tokens * k // num_experts)
        most_rows = min(4 * max(MIN_ROWS, mean), max(_MAX_ROWS, mean))
        rows = [one for one in (16, 32, 64, 128, 256) if mean // 2 <= one <= most_rows]
    shapes: Iterable[tuple[int, int, int, int]] = _FEW + _WIDE if num_tokens <= 256 else _WIDE
    if numbers == FP8_NUMBERS:  # twice as many inputs are as many bytes, and a block has one group
        shapes = [(weights, 128, warps, min(8, 2 * stages - 2)) for weights, _, warps, stages in shapes]
    # Of 4 bits a block is four products, and wide blocks take ten times as long.
    most_inputs = min(128, num_inputs) if numbers.bytes < 1 or numbers == FP8_NUMBERS else num_inputs
    shapes = dict.fromkeys(shape for shape in shapes if shape[1] <= most_inputs)
    tiles = [DotConfig(*shape, 1, block_rows=one) for one in rows for shape in shapes]
    return [tile for tile in tiles if tile.block_weights * tile.block_rows <= _MOST_SUMS]


def _power_of_2(n: int) -> int:
    """The next one, n or more."""
    return 1 << max(0, n - 1).bit_length()
