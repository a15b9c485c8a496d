"""A row of x as `packed_fma_kernel` keeps it in registers: tiles that match those of a weight's words.

Products with 16-bit weights' dtypes are of float16s, two in an instruction, and in half the registers: those of a chunk
are added in float16, then in float32. A float16 has three bits of mantissa more than a bfloat16; for its range, inputs
are multiplied by a power of 2 such that the largest of a chunk is as large as its products may be.

A block of a row is eight tiles, in the order in which a thread has the numbers of its words, as pairs: of nibbles the
first and the second half of a word's four numbers, tiles [n, words]; of bytes the four of a word, of the first two
words of each chunk, then of the others, tiles [n, words / 2]. Of these a thread loads the inputs of its own chunks,
so that nothing is exchanged.

layout: as of `weight_tiles.tile_arguments`. A chunk is the inputs of 16 bytes of codes, four words, which one thread
has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.half_products import ROUNDED_UNIT, joined_pairs, pair_of, rounded_pair
from ringcore.kernels.linears.packed_weight import BYTE_CHUNK, NIBBLE_CHUNK
from ringcore.kernels.linears.round_rows import LARGEST, LEAST_SCALE
from ringcore.kernels.linears.weight_groups import has_quads
from ringcore.kernels.linears.weight_loads import spread_columns
from ringcore.kernels.packed_math import power_of_2

__all__ = ["chunk_inputs", "has_offset", "load_gains", "load_row", "sums_of_chunks"]

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
# An input is below 2^(n + 1), half of a chunk's products below 65504: 8 of e4m3 or bytes, 16 of nibbles less zeros.
_BYTE_EXPONENT, _NIBBLE_EXPONENT = 3, 6
_MAX_PREPARED = 16384  # inputs
_ROUNDED_UNIT = tl.constexpr(ROUNDED_UNIT)


@triton.constexpr_function
def chunk_inputs(layout):
    return NIBBLE_CHUNK if has_quads(layout) else BYTE_CHUNK


@triton.constexpr_function
def has_offset(layout):
    """Whether what is multiplied is more than the numbers, by their zero."""
    return layout[4] != 0 or layout[5]


@triton.jit
def _load_block(
    row, at, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr, cache: tl.constexpr
):
    """Tiles as they are in memory, out of bounds 0, see `_numbers`; of a row [num_inputs], or of n, where `row` points
    to each of them, [n, 1]. cache: the modifier of the loads."""
    distance: tl.constexpr = layout[7] if has_quads(layout) else 8
    if has_quads(layout):
        first = at + spread_columns(tl.arange(0, block_inputs // 4), layout)[None, :]
    else:
        index = tl.arange(0, block_inputs // 2)
        first = at + (index // 8 * 16 + index % 8)[None, :]
    found = ()
    for part in tl.static_range(4 if has_quads(layout) else 2):
        inputs = first + part * distance
        found += (tl.load(row + inputs, mask=inputs < num_inputs, other=0.0, cache_modifier=cache),)
    return found


@triton.jit
def _numbers(loaded, layout: tl.constexpr):
    """What `_load_block` loaded, as eight tiles of float32."""
    found = ()
    for part in tl.static_range(len(loaded)):
        even, odd = tl.split(_in_twos(loaded[part].to(tl.float32)))
        if has_quads(layout):
            found += (even, odd)
        else:
            a, c = tl.split(_in_twos(even))
            b, d = tl.split(_in_twos(odd))
            found += (a, b, c, d)
    return found


@triton.jit
def _in_twos(tile):
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2])


@triton.constexpr_function
def _prepared_inputs(num_inputs, block_inputs, num_rows, is_exact):
    """Of one row those of several blocks, so that each warp prepares others, and they exchange them at once."""
    if is_exact or num_rows > 1:
        return block_inputs
    return max(block_inputs, min(_MAX_PREPARED, 1 << (num_inputs - 1).bit_length()))


@triton.jit
def load_gains(
    gain, num_inputs: tl.constexpr, block_inputs: tl.constexpr, is_exact: tl.constexpr, layout: tl.constexpr
):
    """What `load_row` takes of a norm's weight [num_inputs]. A program loads it before it waits for the row: of what
    all programs read from the L2 cache after the wait it would be a third. Before a wait the L1 cache may hold what
    this memory had earlier, so it is passed by."""
    found = ()
    prepared: tl.constexpr = _prepared_inputs(num_inputs, block_inputs, 1, is_exact)
    for at in tl.static_range(0, num_inputs, prepared):
        found += (_load_block(gain, at, num_inputs, prepared, layout, ".cg"),)
    return found


@triton.jit
def load_row(
    x,
    gains,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    row_group: tl.constexpr,
    is_exact: tl.constexpr,
    layout: tl.constexpr,
):
    """A row [num_inputs], times gains and rounded to FP8 if it is to be: of each block of inputs (tiles, factors), and
    the sum of its squares. x: a pointer to it; or to each of n rows, [n, 1], without a norm. gains: () without one.

    Where is_exact: tiles [1, words] of float32, one for each number of a word, and the sums of chunks [1, chunks] if
    there is an offset. Else tiles [1, chunks, 4] of `joined_pairs`, and the factors of chunks by which sums of products
    are less than meant.
    """
    num_rows: tl.constexpr = 1 if x.type.is_ptr() else x.shape[0]
    prepared: tl.constexpr = _prepared_inputs(num_inputs, block_inputs, num_rows, is_exact)
    blocks = ()
    squares = tl.zeros([1, prepared // 8], tl.float32)
    for at in tl.static_range(0, num_inputs, prepared):
        tiles = _numbers(_load_block(x, at, num_inputs, prepared, layout, ""), layout)
        if len(gains) > 0:
            of_block = _numbers(gains[at // prepared], layout)
            times_gains = ()
            for part in tl.static_range(8):
                squares += tiles[part] * tiles[part]
                times_gains += (tiles[part] * of_block[part],)
            tiles = times_gains
        blocks += (tiles,)
    scales = ()
    if row_group > 0:
        scales = _row_scales(blocks, num_inputs, prepared, row_group)
    found = ()
    for block in tl.static_range(len(blocks)):
        of_block = scales[block] if row_group > 0 else None
        if is_exact:
            found += (_exact(blocks[block], of_block, prepared, layout),)
        else:
            tiles, factors = _halves(blocks[block], of_block, prepared, layout)
            found += _in_blocks(tiles, factors, prepared // block_inputs)
    return found, tl.sum(squares, 1)


@triton.jit
def _in_blocks(tiles, factors, count: tl.constexpr):
    """As of `load_row`, of each of `count` blocks that were prepared together."""
    of_blocks = _split(tl.reshape(factors, [factors.shape[0], factors.shape[1], 1]), count)
    parts = ()
    for part in tl.static_range(len(tiles)):
        parts += (_split(tiles[part], count),)
    found = ()
    for block in tl.static_range(count):
        quad = ()
        for part in tl.static_range(len(tiles)):
            quad += (parts[part][block],)
        found += ((quad, tl.reshape(of_blocks[block], [factors.shape[0], factors.shape[1] // count])),)
    return found


@triton.jit
def _split(tile, count: tl.constexpr):
    """[n, m, k] -> `count` tiles [n, m / count, k]."""
    found = (tile,)
    for _ in tl.static_range(count.bit_length() - 1):
        halves = ()
        for i in tl.static_range(len(found)):
            part = found[i]
            in_twos = tl.reshape(part, [part.shape[0], 2, part.shape[1] // 2, part.shape[2]])
            halves += tl.split(tl.permute(in_twos, (0, 2, 3, 1)))
        found = halves
    return found


@triton.jit
def _of_columns(of_groups, count: tl.constexpr):
    """[n, groups] -> [n, count]: of the columns of a tile."""
    each: tl.constexpr = count // of_groups.shape[1]
    shape: tl.constexpr = [of_groups.shape[0], of_groups.shape[1], each]
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], shape), [of_groups.shape[0], count])


@triton.jit
def _largest(tiles, num_groups: tl.constexpr):
    """[n, groups] of a block: the largest absolute values."""
    largest = tl.abs(tiles[0])
    for part in tl.static_range(1, 8):
        largest = tl.maximum(largest, tl.abs(tiles[part]))
    return tl.max(tl.reshape(largest, [largest.shape[0], num_groups, largest.shape[1] // num_groups]), 2)


@triton.jit
def sums_of_chunks(products, count: tl.constexpr):
    """[n, m] -> [n, count]."""
    return tl.sum(tl.reshape(products, [products.shape[0], count, products.shape[1] // count]), 2)


@triton.jit
def _of_words(tiles, count: tl.constexpr):
    """The tiles of half of the words of each chunk, [n, 2 * count], as those of all."""
    found = ()
    for part in tl.static_range(len(tiles) // 2):
        joined = tl.join(tiles[part], tiles[part + len(tiles) // 2])
        in_order = tl.permute(tl.reshape(joined, [joined.shape[0], count, 2, 2]), (0, 1, 3, 2))
        found += (tl.reshape(in_order, [joined.shape[0], 4 * count]),)
    return found


@triton.jit
def _exact(tiles, scales, block_inputs: tl.constexpr, layout: tl.constexpr):
    """As of `load_row` where is_exact. scales: by which rows are rounded to FP8; or None."""
    found = tiles
    if scales is not None:
        found = _rounded(tiles, scales)
    if not has_quads(layout):
        found = _of_words(found, found[0].shape[1] // 2)
    sums = ()
    if has_offset(layout):
        total = found[0]
        for part in tl.static_range(1, len(found)):
            total += found[part]
        sums = sums_of_chunks(total, block_inputs // chunk_inputs(layout))
    return found, sums


@triton.jit
def _rounded(tiles, scales):
    """The nearest numbers that are codes times scales, float32."""
    of_columns = _of_columns(scales, tiles[0].shape[1])
    by = _of_columns(1.0 / scales, tiles[0].shape[1])
    found = ()
    for part in tl.static_range(8):
        found += ((tiles[part] * by).to(tl.float8e4nv).to(tl.float32) * of_columns,)
    return found


@triton.jit
def _joined(pairs, layout: tl.constexpr):
    """Four tiles of pairs, as of `load_row`."""
    tiles = joined_pairs(pairs[0], pairs[1]), joined_pairs(pairs[2], pairs[3])
    if not has_quads(layout):
        tiles = _of_words(tiles, tiles[0].shape[1] // 2)
    found = ()
    for part in tl.static_range(len(tiles)):
        found += (tl.reshape(tiles[part], [tiles[part].shape[0], tiles[part].shape[1] // 4, 4]),)
    return found


@triton.constexpr_function
def _exponent(layout):
    return _NIBBLE_EXPONENT if has_quads(layout) else _BYTE_EXPONENT


@triton.jit
def _halves(tiles, scales, block_inputs: tl.constexpr, layout: tl.constexpr):
    """As of `load_row`: inputs times powers of 2, or codes. scales: as of `_exact`."""
    count: tl.constexpr = block_inputs // chunk_inputs(layout)
    pairs = ()
    if scales is None:
        least: tl.constexpr = _exponent(layout)  # below 2^(least - 127) inputs are not exact
        exponents = tl.maximum((_largest(tiles, count).to(tl.int32, bitcast=True) >> 23) & 255, least)
        by = _of_columns(power_of_2(254 + least - exponents), block_inputs // 8)
        for part in tl.static_range(4):
            times = by * 0.0625 if has_quads(layout) and part % 2 == 1 else by  # see `nibble_products`
            pairs += (pair_of(tiles[2 * part] * times, tiles[2 * part + 1] * times),)
        factors = power_of_2(exponents - least)
    else:
        by = _of_columns(1.0 / scales, block_inputs // 8)
        for part in tl.static_range(4):
            pairs += (rounded_pair(tiles[2 * part] * by, tiles[2 * part + 1] * by),)
        factors = _of_columns(scales * (1.0 / _ROUNDED_UNIT), count)
    return _joined(pairs, layout), factors


@triton.jit
def _row_scales(blocks, num_inputs: tl.constexpr, block_inputs: tl.constexpr, row_group: tl.constexpr):
    """[n, groups] of each block. A norm's factor, which is not in it yet, does not change codes."""
    count: tl.constexpr = 1 if row_group == num_inputs else block_inputs // row_group
    found = ()
    for block in tl.static_range(len(blocks)):
        found += (tl.maximum(_largest(blocks[block], count) / _LARGEST, _LEAST_SCALE),)
    if row_group == num_inputs:
        scale = found[0]
        for block in tl.static_range(1, len(blocks)):
            scale = tl.maximum(scale, found[block])
        found = ()
        for _ in tl.static_range(len(blocks)):
            found += (scale,)
    return found
