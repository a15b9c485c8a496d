"""A row of x as `packed_fma_kernel` keeps it in registers: tiles that match those of a weight's words.

Products with 16-bit weights' dtypes are of float16s, two in an instruction, and in half the registers: four of a word
are added in float16, then in float32. A float16 has three bits of mantissa more than a bfloat16; for its range, inputs
are multiplied by a power of 2 such that the largest of a chunk is as large as its products may be.

layout: as of `weight_tiles.tile_arguments`. A chunk is the inputs of 16 bytes of codes, which one thread has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.fp8_kv import power_of_2
from ringcore.kernels.half_products import NIBBLE_UNITS
from ringcore.kernels.packed_weight import BYTE_CHUNK, NIBBLE_CHUNK
from ringcore.kernels.round_rows import LARGEST, LEAST_SCALE
from ringcore.kernels.weight_groups import has_quads
from ringcore.kernels.weight_loads import spread_columns

__all__ = ["chunk_inputs", "has_offset", "load_row", "sums_of_chunks"]

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
_BY_CODES = tl.constexpr(2.0**-4)  # inputs that are codes of e4m3, exactly
# An input is below 2^(n + 1): four products of e4m3 or of bytes are below 65504, and so are nibbles, of their units.
_BYTE_EXPONENT, _NIBBLE_EXPONENT = 4, 14


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


@triton.constexpr_function
def has_offset(layout):
    """Whether what is multiplied is more than the numbers, by their zero."""
    return layout[4] != 0 or layout[5]


@triton.jit
def load_row(
    x,
    gain,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    has_norm: tl.constexpr,
    row_group: tl.constexpr,
    is_exact: tl.constexpr,
    layout: tl.constexpr,
):
    """A row [num_inputs], times the gain and rounded to FP8 if it is to be: (tiles, sums, factors), and the sum of its
    squares. x: a pointer to it; or to each of n rows, [n, 1], without a norm.

    Of each block of inputs: four tiles [1, m] that match those of the numbers, float32 where is_exact, else float16;
    where is_exact the sums of its chunks [1, chunks], if there is an offset; else the chunks' factors, by which sums of
    products are less than meant.
    """
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
    scales = ()
    if row_group > 0:
        tiles, scales = _rounded(tiles, num_inputs, block_inputs, row_group, layout)
    found = ()
    sums = ()
    factors = ()
    for block in tl.static_range(len(tiles) // 4):
        quad = tiles[4 * block], tiles[4 * block + 1], tiles[4 * block + 2], tiles[4 * block + 3]
        if is_exact:
            if row_group > 0:
                numbers = quad[0].to(tl.float32), quad[1].to(tl.float32), quad[2].to(tl.float32), quad[3].to(tl.float32)
                quad = _times(numbers, _of_columns(scales[block], block_inputs))
        else:
            if row_group > 0:
                quad, of_chunks = _times(quad, _BY_CODES), scales[block] * (1.0 / _BY_CODES)
            else:
                quad, of_chunks = _halves(quad, layout)
            factors += (of_chunks,)
        if is_exact and has_offset(layout):
            sums += (sums_of_chunks(quad[0] + quad[1] + quad[2] + quad[3], chunk_inputs(layout) // 4),)
        found += quad
    return (found, sums, factors), tl.sum(squares, 1)


@triton.jit
def _times(quad, factors):
    return quad[0] * factors, quad[1] * factors, quad[2] * factors, quad[3] * factors


@triton.jit
def _of_columns(of_chunks, block_inputs: tl.constexpr):
    """[n, chunks] -> [n, m], of the words of a block."""
    count: tl.constexpr = of_chunks.shape[1]
    shape: tl.constexpr = [of_chunks.shape[0], count, block_inputs // 4 // count]
    return tl.reshape(tl.broadcast_to(of_chunks[:, :, None], shape), [of_chunks.shape[0], block_inputs // 4])


@triton.constexpr_function
def _exponent(layout):
    return _NIBBLE_EXPONENT if has_quads(layout) else _BYTE_EXPONENT


@triton.constexpr_function
def _unit(layout, part):
    """What a code of 1 is among the numbers that a tile meets."""
    return NIBBLE_UNITS[part] if has_quads(layout) else 1.0


@triton.jit
def _to_halves(quad, layout: tl.constexpr):
    """float32, of inputs less than 2^(`_exponent` + 1)."""
    second: tl.constexpr = _unit(layout, 0) / _unit(layout, 1)
    return (
        quad[0].to(tl.float16),
        (quad[1] * second).to(tl.float16),
        quad[2].to(tl.float16),
        (quad[3] * second).to(tl.float16),
    )


@triton.jit
def _halves(quad, layout: tl.constexpr):
    """Tiles [n, m] of a block in float16, times powers of 2; and the factors of chunks, [n, chunks]."""
    size: tl.constexpr = chunk_inputs(layout) // 4
    shape: tl.constexpr = [quad[0].shape[0], quad[0].shape[1] // size, size]
    largest = tl.maximum(tl.maximum(tl.abs(quad[0]), tl.abs(quad[1])), tl.maximum(tl.abs(quad[2]), tl.abs(quad[3])))
    largest = tl.max(tl.reshape(largest, shape), 2)
    least: tl.constexpr = _exponent(layout)  # below 2^(least - 127) inputs are not exact
    exponents = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, least)
    by = _of_columns(power_of_2(254 + least - exponents), quad[0].shape[1] * 4)
    return _to_halves(_times(quad, by), layout), power_of_2(exponents - least) * (1.0 / _unit(layout, 0))


@triton.jit
def _rounded(
    tiles, num_inputs: tl.constexpr, block_inputs: tl.constexpr, row_group: tl.constexpr, layout: tl.constexpr
):
    """(the numbers of codes in float16, the scales of each block's chunks [n, chunks]). A norm's factor, which is not
    in them yet, does not change codes."""
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
    count: tl.constexpr = block_inputs // chunk_inputs(layout)
    found = ()
    of_chunks = ()
    for tile in tl.static_range(len(tiles)):
        of_groups = scale if by_row else all_scales[tile // 4]
        codes = (tl.reshape(tiles[tile], shape) * (1.0 / of_groups)).to(tl.float8e4nv)
        found += (tl.reshape(codes.to(tl.float16), [num_rows, block_inputs // 4]),)
        if tile % 4 == 0:
            spread = tl.broadcast_to(of_groups, [num_rows, shape[1], count // shape[1]])
            of_chunks += (tl.reshape(spread, [num_rows, count]),)
    return found, of_chunks


@triton.jit
def sums_of_chunks(products, size: tl.constexpr):
    """[n, m] -> [n, m / size]."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // size, size]), 2)
