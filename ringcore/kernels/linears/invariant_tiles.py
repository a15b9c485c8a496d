"""The tiles of a product on a GPU whose rows do not depend on how many there are.

What a row's sum depends on is chosen by the weight alone: its spans of inputs, and the instructions. A span is a split
of few rows, whose programs would be too few for the device without, and a segment of a program of many rows; both
reduce spans in the same order. A program of more rows or outputs reads less of L2 for a product, and has another width
of the tensor cores' instruction: whether tiles agree is asked of the device. On Hopper up to 64 rows are those of
`tma_kernel`, if it agrees.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ringcore.kernels.launch.precompile import NotLaunchedError
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.round_rows import round_rows
from ringcore.kernels.linears.skinny_configs import many_packed
from ringcore.kernels.linears.skinny_linear import MAX_ROW_BLOCKS, skinny_linear
from ringcore.kernels.linears.skinny_tiles import DotConfig, TmaConfig
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.linears.tma_configs import has_wgmma, laid_out

__all__ = ["ROWS", "InvariantTiles", "agreeing", "dense_tiles"]

_log = logging.getLogger(__name__)

ROWS = 64  # of the tile with which others agree
_MAX_SPANS, _MIN_SPAN_INPUTS = 8, 1024
_ENOUGH_PROGRAMS = NUM_SMS * 3 // 4
_DENSE = DotConfig(128, 64, 8, 4, 1)
_FEW_ROWS = DotConfig(64, 128, 4, 4, 1)
_MANY_ROWS = DotConfig(128, 64, 8, 3, 1)  # of which two programs fit on a multiprocessor
_MOST_ROWS = DotConfig(128, 64, 8, 4, 1)
_MANY = 128  # rows, from which on a program has no fewer
_MOST = 256  # rows, without spans, whose sum needs as many registers again
_FEW_ROUNDED = DotConfig(64, 128, 4, 6, 1)
_GROUP = 128  # inputs and outputs that share a scale
_BY_TMA = TmaConfig(64, 128, 6), TmaConfig(64, 64, 4)  # of up to ROWS rows
_FLOAT32 = DotConfig(32, 32, 4, 2, 1, prefetched_inputs=0, block_rows=32)  # without tensor cores


Tile = DotConfig | TmaConfig


def _of_rows(tile: DotConfig, rows: int) -> DotConfig:
    return replace(tile, block_rows=rows, least_rows=rows)


def _most_rows(tile: Tile) -> int:
    """Of one program."""
    return tile.block_rows if isinstance(tile, DotConfig) else ROWS


class InvariantTiles:
    """Of a weight on a device."""

    def __init__(self, weight: torch.Tensor | PackedWeight, *, rounds_rows: bool = False) -> None:
        """rounds_rows: an FP8 weight is multiplied by rows that are rounded to FP8."""
        tiles: tuple[DotConfig, ...]
        self._by_tma: tuple[TmaConfig, ...] = ()
        if rounds_rows:
            tiles = agreeing(weight.dtype, weight.device, _ROUNDED, _multiply_rounded)
        elif isinstance(weight, PackedWeight):
            tiles = (_of_rows(weight.narrowed(many_packed(weight.numbers)), ROWS),)
        elif weight.dtype == torch.float32:
            tiles = (_of_rows(_FLOAT32, _FLOAT32.block_rows),)
        else:
            # Few outputs: a smaller tile, so that most multiprocessors have one.
            block_weights, num_warps = (128, 8) if len(weight) >= 128 * NUM_SMS else (64, 4)
            candidates = dense_tiles(block_weights, num_warps)
            tiles = agreeing(weight.dtype, weight.device, candidates, _multiply)
            if has_wgmma(weight.device) and len(weight) % 16 == 0 and weight.data_ptr() % 16 == 0:
                asked: tuple[Tile, ...] = (*candidates[:3], *_BY_TMA)
                agree = agreeing(weight.dtype, weight.device, asked, _multiply)
                self._by_tma = tuple(tile for tile in agree if isinstance(tile, TmaConfig))
        (base,) = (tile for tile in tiles if tile.block_rows == min(ROWS, tiles[-1].block_rows))
        self._num_outputs, self._num_inputs = weight.shape  # outputs: where no gate halves them
        num_tiles = -(-self._num_outputs // base.block_weights)
        self._spans = 1
        while (
            2 * self._spans <= _MAX_SPANS
            and 2 * self._spans * num_tiles <= 2 * NUM_SMS
            and 2 * self._spans * _MIN_SPAN_INPUTS <= weight.shape[1]
        ):
            self._spans *= 2
        self._tiles = [
            tile
            for tile in tiles
            if self._spans == 1 or (self._span_inputs(tile) == self._span_inputs(base) and tile.block_rows < _MOST)
        ]

    def _span_inputs(self, tile: DotConfig) -> int:
        """As `dot_kernel` cuts them: in whole blocks."""
        blocks = -(-self._num_inputs // tile.block_inputs)
        return -(-blocks // self._spans) * tile.block_inputs

    def _least_work(self, num_rows: int) -> DotConfig:
        """Of a multiprocessor, in whole programs: what is left of the last wave costs as much as the wave."""
        able = [tile for tile in self._tiles if tile.block_rows >= min(num_rows, _MANY)] or self._tiles[-1:]

        def work(tile: DotConfig) -> tuple[int, int]:
            programs = -(-self._num_outputs // tile.block_weights) * -(-num_rows // tile.block_rows)
            return -(-programs * self._spans // NUM_SMS) * tile.block_rows * tile.block_weights, -tile.block_rows

        return min(able, key=work)

    def _choose_tma(self, num_rows: int) -> TmaConfig | None:
        """In spans as they are cut for `dot_kernel`."""
        for tile in self._by_tma:
            if num_rows <= ROWS and self._num_inputs % (self._spans * tile.block_inputs) == 0:
                items = -(-self._num_outputs // tile.block_weights) * self._spans
                shape = tile.block_weights, tile.block_inputs, self._spans
                found = laid_out(items, num_rows, *shape)
                if found is not None:
                    return found
        return None

    def choose(self, num_rows: int) -> DotConfig | TmaConfig:
        by_tma = self._choose_tma(num_rows)
        if by_tma is not None:
            return by_tma
        tile = self._least_work(num_rows)
        num_tiles, row_tiles = -(-self._num_outputs // tile.block_weights), -(-num_rows // tile.block_rows)
        if row_tiles > MAX_ROW_BLOCKS or num_tiles * row_tiles > _ENOUGH_PROGRAMS:
            tile = replace(tile, segments=self._spans)
        else:
            tile = replace(tile, splits=self._spans)
        programs = num_tiles * row_tiles * tile.splits
        if tile.block_rows == _MANY and tile.num_stages == _MANY_ROWS.num_stages and -programs % NUM_SMS < NUM_SMS // 4:
            # Two on a multiprocessor are for a last wave that is far from full.
            tile = replace(tile, num_stages=tile.num_stages + 1)
        # When a later wave starts, the kernel before has long ended.
        return tile if programs <= NUM_SMS else replace(tile, prefetched_inputs=0)


_ROUNDED = (
    *(_of_rows(_FEW_ROUNDED, rows) for rows in (16, 32, ROWS)),
    _of_rows(DotConfig(128, 128, 8, 4, 1), _MANY),
)
# rows [n, num_inputs], weight [num_outputs, num_inputs], a tile of n rows or more, and the product, float32
Multiply = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], None]
AnyTile = TypeVar("AnyTile", DotConfig, Tile)


def _multiply(rows: torch.Tensor, weight: torch.Tensor, tile: Tile, out: torch.Tensor) -> None:
    skinny_linear(rows, weight, tile, out=out)


def _multiply_rounded(rows: torch.Tensor, weight: torch.Tensor, tile: DotConfig, out: torch.Tensor) -> None:
    """Half of the outputs in groups of inputs, half with one scale for a row and for an output: what the kernel adds up
    in two ways."""
    num_inputs = weight.shape[1]
    for group, codes, columns in zip((_GROUP, num_inputs), weight.chunk(2), out.chunk(2, 1), strict=True):
        scales = torch.ones(len(codes), num_inputs // group, device=codes.device)
        stored = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        fp8 = PackedWeight(stored, scales, (len(codes), num_inputs), rows.dtype, BYTES_FP8, num_inputs, group)
        columns.copy_(skinny_linear(round_rows(rows, group), fp8, tile, out=columns.contiguous()))


def dense_tiles(block_weights: int, num_warps: int) -> tuple[DotConfig, ...]:
    """Of 16 bits, for `agreeing`: those of `ROWS` rows have block_weights outputs."""
    tile = replace(_DENSE, block_weights=block_weights, num_warps=num_warps)
    of_rows = {16: _FEW_ROWS, 32: _FEW_ROWS, ROWS: tile, _MANY: _MANY_ROWS, _MOST: _MOST_ROWS}
    return tuple(_of_rows(tile, rows) for rows, tile in of_rows.items())


def agreeing(
    dtype: torch.dtype, device: torch.device, tiles: tuple[AnyTile, ...], multiply: Multiply
) -> tuple[AnyTile, ...]:
    """Those tiles, ascending by rows, with which every row has the bits that it has in the tile of `ROWS` rows.
    multiply: a function of a module, by the kernel that is asked. dtype: of 16 bits."""
    try:
        return _agreeing(dtype, device, tiles, multiply)
    except NotLaunchedError:  # kernel warm-up, which compiles them
        return tiles


@functools.cache  # not what it raises
def _agreeing(
    dtype: torch.dtype, device: torch.device, tiles: tuple[AnyTile, ...], multiply: Multiply
) -> tuple[AnyTile, ...]:
    """Asked by products whose terms cancel, so that a sum in another order is another number."""
    generator = torch.Generator().manual_seed(1)
    num_rows, num_inputs = _most_rows(tiles[-1]), 512
    half = torch.randn(num_rows, num_inputs // 2, generator=generator)
    magnitudes = torch.randint(-8, 9, (num_inputs // 2,), generator=generator).exp2()
    order = torch.randperm(num_inputs, generator=generator)
    x = torch.cat((half * magnitudes, -half * magnitudes), 1)[:, order].to(dtype).to(device)
    columns = torch.randn(128, num_inputs // 2, generator=generator)
    weight = torch.cat((columns, columns), 1)[:, order].to(dtype).to(device)

    def product(tile: Tile) -> torch.Tensor:
        parts = []
        for rows in torch.split(x, _most_rows(tile)):
            out = torch.full((len(rows), len(weight)), torch.nan, device=device)
            multiply(rows.contiguous(), weight, tile, out)
            parts.append(out)
        return torch.cat(parts)

    products = [product(tile) for tile in tiles]
    exact = products[[_most_rows(tile) for tile in tiles].index(ROWS)]
    if exact.isnan().any():
        raise NotLaunchedError
    agree = tuple(tile for tile, found in zip(tiles, products, strict=True) if torch.equal(found, exact))
    _log.info("batch-invariant products in %s: tiles of %s rows agree", dtype, [_most_rows(tile) for tile in agree])
    return agree
