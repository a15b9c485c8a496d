"""The tiles of a product on a GPU whose rows do not depend on how many there are.

What a row's sum depends on is chosen by the weight alone: its spans of inputs, and the instructions. A span is a split
of few rows, whose programs would be too few for the device without, and a segment of a program of many rows; both
reduce spans in the same order. How many rows a program has is another width of the tensor cores' instruction: whether
they agree is asked of the device.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ringcore.kernels.packed_weight import PackedWeight
from ringcore.kernels.skinny_configs import many_packed
from ringcore.kernels.skinny_linear import MAX_ROW_BLOCKS, skinny_linear
from ringcore.kernels.skinny_tiles import DotConfig
from ringcore.kernels.skinny_times import NUM_SMS

__all__ = ["InvariantTiles", "agreeing_rows"]

_ROWS = 64  # of a program, where it may have but one number of rows
_WIDTHS = (16, 32, 128)  # others that are asked about
_MAX_SPANS, _MIN_SPAN_INPUTS = 8, 1024
_DENSE = DotConfig(128, 64, 8, 4, 1)
_FLOAT32 = DotConfig(32, 32, 4, 2, 1, prefetched_inputs=0, block_rows=32)  # without tensor cores


class InvariantTiles:
    """Of a weight on a device."""

    def __init__(self, weight: torch.Tensor | PackedWeight) -> None:
        self._widths: tuple[int, ...] = (_ROWS,)
        if isinstance(weight, PackedWeight):
            tile = replace(many_packed(weight.numbers), block_rows=_ROWS)
            if weight.dtype == torch.float32:  # x takes twice the shared memory
                tile = replace(tile, block_weights=64, block_inputs=64, num_warps=4, num_stages=2)
        elif weight.dtype == torch.float32:
            tile, self._widths = _FLOAT32, (_FLOAT32.block_rows,)
        else:
            # Few outputs: a smaller tile, so that most multiprocessors have one.
            block_weights, num_warps = (128, 8) if len(weight) >= 128 * NUM_SMS else (64, 4)
            tile = replace(_DENSE, block_weights=block_weights, num_warps=num_warps)
            self._widths = agreeing_rows(weight.dtype, weight.device, block_weights, num_warps)
        self._tile = tile
        self._num_tiles = -(-len(weight) // tile.block_weights)  # of outputs, where no gate halves them
        self._spans = 1
        while (
            2 * self._spans <= _MAX_SPANS
            and 2 * self._spans * self._num_tiles <= 2 * NUM_SMS
            and 2 * self._spans * _MIN_SPAN_INPUTS <= weight.shape[1]
        ):
            self._spans *= 2

    def choose(self, num_rows: int) -> DotConfig:
        width = next((width for width in self._widths if width >= num_rows), self._widths[-1])
        tile = replace(self._tile, block_rows=width, least_rows=width)
        row_tiles = -(-num_rows // width)
        if row_tiles > MAX_ROW_BLOCKS or self._num_tiles * row_tiles >= NUM_SMS:
            return replace(tile, segments=self._spans)
        return replace(tile, splits=self._spans)


@functools.cache
def agreeing_rows(dtype: torch.dtype, device: torch.device, block_weights: int, num_warps: int) -> tuple[int, ...]:
    """Of 16-bit products: the numbers of rows of a program, ascending, with which every row has the bits that it has in
    programs of `_ROWS`. Asked by products whose terms cancel, so that a sum in another order is another number."""
    generator = torch.Generator().manual_seed(1)
    half, num_inputs = torch.randn(2 * _ROWS, 256, generator=generator), 512
    magnitudes = torch.randint(-8, 9, (256,), generator=generator).exp2()
    order = torch.randperm(num_inputs, generator=generator)
    x = torch.cat((half * magnitudes, -half * magnitudes), 1)[:, order].to(dtype).to(device)
    columns = torch.randn(256, 256, generator=generator)
    weight = torch.cat((columns, columns), 1)[:, order].to(dtype).to(device)
    tile = replace(_DENSE, block_weights=block_weights, num_warps=num_warps)

    def product(width: int, rows: torch.Tensor) -> torch.Tensor:
        config = replace(tile, block_rows=width, least_rows=width)
        return skinny_linear(rows, weight, config, out=rows.new_empty(len(rows), len(weight), dtype=torch.float32))

    exact = product(_ROWS, x)
    agree = [_ROWS]
    for width in _WIDTHS:
        parts = [product(width, rows.contiguous()) for rows in torch.split(x, width)]
        if torch.equal(torch.cat(parts), exact):
            agree.append(width)
    return tuple(sorted(agree))
