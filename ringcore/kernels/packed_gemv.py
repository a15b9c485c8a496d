"""The product of one row by some outputs of a quantized weight, in registers (a GEMV): FMA sums of codes, scaled chunk
by chunk. What the kernels of linears and of experts for one row share.

layout, packed: see `weight_tiles.tile_arguments`; the weight `has_chunks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.code_expansion import fp8_quad, integer_quad, wide_integer_quad
from ringcore.kernels.fma_row import chunk_inputs, has_offset, sums_of_chunks
from ringcore.kernels.half_products import add_half_products, fp8_halves, integer_halves, less_zeros, nibble_halves
from ringcore.kernels.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES
from ringcore.kernels.weight_groups import chunk_scales, chunk_zeros
from ringcore.kernels.weight_loads import load_codes

__all__ = ["chunk_products", "load_outputs"]

_FP8, _INT8, _NIBBLES = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8), tl.constexpr(NIBBLES)


@triton.jit
def load_outputs(weight, packed, rows, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr):
    """Words and scales of outputs, of each block of inputs: one tuple."""
    chunk: tl.constexpr = chunk_inputs(layout)
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    loaded = ()
    for at in tl.static_range(0, num_inputs, block_inputs):
        words = load_codes(weight, packed, rows, at // 4, block_inputs // 4, 4, num_inputs, is_whole)
        loaded += (words, chunk_scales(packed, rows, at, block_inputs // chunk, chunk, layout))
    return loaded


@triton.jit
def _half_zeros(zeros, count: tl.constexpr, layout: tl.constexpr):
    """Of the first and third number of words, and of the second and fourth, in the units of numbers: float16 [n, m].
    zeros: of chunks of `count` words, [n, chunks] float32; or None where it is one for all, then [1, 1]."""
    if zeros is None:
        of_words = tl.full([1, 1], layout[4], tl.float32)
    else:
        spread = tl.broadcast_to(zeros[:, :, None], [zeros.shape[0], zeros.shape[1], count])
        of_words = tl.reshape(spread, [zeros.shape[0], zeros.shape[1] * count])
    if layout[0] == _NIBBLES:
        bits = of_words.to(tl.int16)
        first, second = bits.to(tl.float16, bitcast=True), (bits << 4).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        first = of_words.to(tl.float16)
        second = first
    return first, second


@triton.jit
def _products(words, zeros, a, b, c, d, is_exact: tl.constexpr, layout: tl.constexpr):
    """[n, m] float32: the sums of four products, of a word's numbers and its column of the four tiles. zeros: of
    `_half_zeros`, which are subtracted from the numbers unless is_exact."""
    if is_exact:
        if layout[0] == _NIBBLES:
            numbers = integer_quad(words, None, tl.float32, 0)
        elif layout[0] == _FP8:
            numbers = fp8_quad(words)
        else:
            numbers = wide_integer_quad(words, layout[0] == _INT8)
        products = numbers[0] * a + numbers[1] * b + numbers[2] * c + numbers[3] * d
    else:
        if layout[0] == _NIBBLES:
            numbers = nibble_halves(words)
        elif layout[0] == _FP8:
            numbers = fp8_halves(words)
        else:
            numbers = integer_halves(words, layout[0] == _INT8)
        products = add_half_products(None, less_zeros(numbers[0], zeros[0]), a)
        products = add_half_products(products, less_zeros(numbers[1], zeros[1]), b)
        products = add_half_products(products, less_zeros(numbers[2], zeros[0]), c)
        products = add_half_products(products, less_zeros(numbers[3], zeros[1]), d).to(tl.float32)
    return products


@triton.jit
def chunk_products(
    loaded,  # see `load_outputs`
    first: tl.constexpr,  # of it: the codes of these outputs
    row,  # of `load_row`; or n of them, each for an output
    packed,
    rows,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_exact: tl.constexpr,
    layout: tl.constexpr,
):
    """[n, chunks]: of outputs and a row, the sums over the inputs of chunks; those of all blocks are added. The sum of
    these is the product."""
    tiles, sums, factors = row
    chunk: tl.constexpr = chunk_inputs(layout)
    count: tl.constexpr = block_inputs // chunk
    total = tl.zeros([rows.shape[0], count], tl.float32)
    for block in tl.static_range(len(tiles) // 4):
        words, scales = loaded[first + 2 * block], loaded[first + 2 * block + 1]
        quad = tiles[4 * block], tiles[4 * block + 1], tiles[4 * block + 2], tiles[4 * block + 3]
        zeros = None
        if layout[5]:
            zeros = chunk_zeros(packed, scales, rows, block * block_inputs, count, chunk, layout)
        if is_exact or not has_offset(layout):
            of_words = None, None
        else:
            of_words = _half_zeros(zeros, chunk // 4, layout)
        of_chunks = sums_of_chunks(_products(words, of_words, *quad, is_exact, layout), chunk // 4)
        if is_exact:
            if has_offset(layout):
                of_chunks -= (layout[4] if zeros is None else zeros) * sums[block]
        else:
            scales *= factors[block]
        total += of_chunks * scales
    return total
