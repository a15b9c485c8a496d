"""A row of x as `packed_fma_kernel` keeps it in registers: float32 tiles that match those of a weight's words.

layout: as of `weight_tiles.tile_arguments`. A chunk is the inputs of 16 bytes of codes, which one thread has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.packed_weight import BYTE_CHUNK, NIBBLE_CHUNK
from ringcore.kernels.round_rows import LARGEST, LEAST_SCALE
from ringcore.kernels.weight_groups import has_quads
from ringcore.kernels.weight_loads import spread_columns

__all__ = ["chunk_inputs", "chunk_sums", "load_row", "sums_of_chunks"]

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)


@triton.constexpr_function
def chunk_inputs(layout):
    return NIBBLE_CHUNK if has_quads(layout) else BYTE_CHUNK


@triton.jit
def _load_quad(row, at, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr):
    """A block of a row, [num_inputs], as the four numbers of words meet it: four [1, m] float32, out of bounds 0; or of
    n rows, [n, m], where `row` points to each of them, [n, 1]."""
    count: tl.constexpr = block_inputs // 4
    if layout[7] == 1:  # consecutive numbers, loaded as such: one by one they are four times the transactions
        inputs = at + tl.arange(0, block_inputs)[None, :]
        loaded = tl.load(row + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(loaded, [loaded.shape[0], count, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        inputs = at + spread_columns(tl.arange(0, count), layout)[None, :]
        a = _load_in_bounds(row, inputs, num_inputs)
        b = _load_in_bounds(row, inputs + layout[7], num_inputs)
        c = _load_in_bounds(row, inputs + 2 * layout[7], num_inputs)
        d = _load_in_bounds(row, inputs + 3 * layout[7], num_inputs)
    return a, b, c, d


@triton.jit
def _load_in_bounds(row, inputs, num_inputs: tl.constexpr):
    return tl.load(row + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)


@triton.jit
def load_row(
    x,
    gain,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    has_norm: tl.constexpr,
    row_group: tl.constexpr,
    layout: tl.constexpr,
):
    """A row [num_inputs] as tuples of tiles [1, m] that match those of the numbers, times the gain and rounded to FP8
    if it is to be; and the sum of its squares. x: a pointer to it; or to each of n rows, [n, 1], without a norm."""
    tiles = ()
    squares = tl.zeros([1, block_inputs // 4], tl.float32)
    for at in tl.static_range(0, num_inputs, block_inputs):
        of_block = _load_quad(x, at, num_inputs, block_inputs, layout)
        if has_norm:
            gains = _load_quad(gain, at, num_inputs, block_inputs, layout)
            for part in tl.static_range(4):
                squares += of_block[part] * of_block[part]
                tiles += (of_block[part] * gains[part],)
        else:
            tiles += of_block
    if row_group > 0:
        tiles = _rounded(tiles, num_inputs, block_inputs, row_group)
    return tiles, tl.sum(squares, 1)


@triton.jit
def _rounded(tiles, num_inputs: tl.constexpr, block_inputs: tl.constexpr, row_group: tl.constexpr):
    """Codes times their scales. A norm's factor, which is not in them yet, does not change codes."""
    by_row: tl.constexpr = row_group == num_inputs
    size: tl.constexpr = block_inputs if by_row else row_group
    num_rows: tl.constexpr = tiles[0].shape[0]
    shape: tl.constexpr = [num_rows, block_inputs // size, size // 4]
    all_scales = ()
    for block in tl.static_range(0, len(tiles), 4):
        largest = tl.maximum(tl.abs(tiles[block]), tl.abs(tiles[block + 1]))
        largest = tl.maximum(largest, tl.maximum(tl.abs(tiles[block + 2]), tl.abs(tiles[block + 3])))
        scales = tl.max(tl.reshape(largest, shape), 2, keep_dims=True) / _LARGEST
        all_scales += (tl.maximum(scales, _LEAST_SCALE),)
    if by_row:
        scale = all_scales[0]
        for block in tl.static_range(1, len(all_scales)):
            scale = tl.maximum(scale, all_scales[block])
    found = ()
    for tile in tl.static_range(len(tiles)):
        of_groups = scale if by_row else all_scales[tile // 4]
        codes = (tl.reshape(tiles[tile], shape) * (1.0 / of_groups)).to(tl.float8e4nv)
        rounded = codes.to(tl.float16).to(tl.float32) * of_groups
        found += (tl.reshape(rounded, [num_rows, block_inputs // 4]),)
    return found


@triton.jit
def sums_of_chunks(products, size: tl.constexpr):
    """[n, m] -> [n, m / size]."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // size, size]), 2)


@triton.jit
def chunk_sums(tiles, layout: tl.constexpr):
    """Of `load_row`'s tiles: a tuple of [n, chunks], of each block of inputs."""
    found = ()
    for block in tl.static_range(0, len(tiles), 4):
        total = tiles[block] + tiles[block + 1] + tiles[block + 2] + tiles[block + 3]
        found += (sums_of_chunks(total, chunk_inputs(layout) // 4),)
    return found
