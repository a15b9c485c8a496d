"""The product of one row by some outputs of a quantized weight, in registers (a GEMV): FMA sums of codes, scaled chunk
by chunk. What the kernels of linears and of experts for one row share.

layout, packed: see `weight_tiles.tile_arguments`; the weight `has_chunks`, `as_words`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.code_expansion import fp8_quad, integer_quad, wide_integer_quad
from ringcore.kernels.linears.fma_row import chunk_inputs, has_offset, sums_of_chunks
from ringcore.kernels.linears.half_products import byte_products, fp8_products, nibble_products, sums_of_words
from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES
from ringcore.kernels.linears.tile_load import WEIGHT_EVICTION
from ringcore.kernels.linears.weight_groups import chunk_scales, chunk_zeros
from ringcore.kernels.linears.weight_loads import load_codes

__all__ = ["chunk_products", "load_outputs", "sums_of_both"]

_FP8, _INT8, _NIBBLES = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8), tl.constexpr(NIBBLES)


@triton.jit
def load_outputs(
    weight, packed, rows, of_scales, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr
):
    """Words and scales of outputs, of each block of inputs: one tuple. of_scales: rows, or one of them where all share
    their scales."""
    chunk: tl.constexpr = chunk_inputs(layout)
    each: tl.constexpr = chunk // 4
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    loaded = ()
    for at in tl.static_range(0, num_inputs, block_inputs):
        words = load_codes(
            weight, packed, rows, at // each, block_inputs // each, each, num_inputs, is_whole, eviction=WEIGHT_EVICTION
        )
        loaded += (words, chunk_scales(packed, of_scales, at, block_inputs // chunk, chunk, layout))
    return loaded


@triton.jit
def _products(words, zeros, tiles, layout: tl.constexpr):
    """[n, chunks] float32: the sums of a chunk's products of float16s. zeros: int32 [n, chunks], or one for all."""
    count: tl.constexpr = words.shape[1] // 4
    of_chunks = tl.reshape(words, [words.shape[0], count, 4])
    if layout[0] == _FP8:
        pairs = fp8_products(of_chunks, tiles[0])
    elif layout[0] == _NIBBLES:
        pairs = nibble_products(of_chunks, zeros[:, :, None], tiles[0], tiles[1])
    else:
        pairs = byte_products(of_chunks, zeros[:, :, None], tiles[0], layout[0] == _INT8)
    return sums_of_words(pairs)


@triton.jit
def _exact_products(words, tiles, layout: tl.constexpr):
    """[n, words] float32: the sums of a word's products, zeros not subtracted."""
    if layout[0] == _NIBBLES:
        a, b, c, d = integer_quad(words, None, tl.float32, 0)
        sums = a * tiles[0] + b * tiles[2] + c * tiles[4] + d * tiles[6]
        a, b, c, d = integer_quad(words >> 16, None, tl.float32, 0)
        sums += a * tiles[1] + b * tiles[3] + c * tiles[5] + d * tiles[7]
    else:
        if layout[0] == _FP8:
            a, b, c, d = fp8_quad(words)
        else:
            a, b, c, d = wide_integer_quad(words, layout[0] == _INT8)
        sums = a * tiles[0] + b * tiles[1] + c * tiles[2] + d * tiles[3]
    return sums


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
    chunk: tl.constexpr = chunk_inputs(layout)
    count: tl.constexpr = block_inputs // chunk
    total = tl.zeros([rows.shape[0], count], tl.float32)
    for at in tl.static_range(0, num_inputs, block_inputs):
        words, scales = loaded[first + at // block_inputs * 2], loaded[first + at // block_inputs * 2 + 1]
        tiles, of_row = row[at // block_inputs]
        if layout[5]:
            zeros = chunk_zeros(packed, scales, rows, at, count, chunk, layout)
        else:
            zeros = tl.full([1, 1], layout[4], tl.int32)
        if is_exact:
            of_chunks = sums_of_chunks(_exact_products(words, tiles, layout), count)
            if has_offset(layout):
                of_chunks -= zeros * of_row
        else:
            of_chunks = _products(words, zeros, tiles, layout)
            scales *= of_row
        total += of_chunks * scales
    return total


@triton.jit
def sums_of_both(first, second):
    """[n] each, of [n, chunks]: warps exchange the sums of both at once."""
    return tl.split(tl.sum(tl.join(first, second), 1))
