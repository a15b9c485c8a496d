"""The product of one row by some outputs of a quantized weight, in registers (a GEMV): FMA sums of codes, scaled chunk
by chunk. What the kernels of linears and of experts for one row share.

layout, packed: see `weight_tiles.tile_arguments`; the weight `has_chunks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.code_expansion import RAISED, fp8_quad, raised_quad, wide_integer_quad
from ringcore.kernels.fma_row import chunk_inputs, sums_of_chunks
from ringcore.kernels.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES
from ringcore.kernels.weight_groups import chunk_scales, chunk_zeros
from ringcore.kernels.weight_loads import load_codes

__all__ = ["chunk_products", "has_offset", "load_outputs"]

_RAISED = RAISED.value
_FP8, _INT8, _NIBBLES = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8), tl.constexpr(NIBBLES)


@triton.constexpr_function
def _raised_by(layout, is_exact):
    """How much more than codes the numbers are. Of 16-bit rows the sum of what is too much is subtracted from that of a
    chunk, which loses 17 bits less than the mantissa of float32 has; of float32 rows each number is exact."""
    return _RAISED if layout[0] == _NIBBLES and not is_exact else 0


@triton.constexpr_function
def has_offset(layout, is_exact):
    """Whether what is multiplied is more than the numbers, by their zero."""
    return _raised_by(layout, is_exact) != 0 or layout[4] != 0 or layout[5]


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
def _expanded(words, is_exact: tl.constexpr, layout: tl.constexpr):
    """Four tiles of numbers, as float32, and `_raised_by`."""
    if layout[0] == _NIBBLES:
        a, b, c, d = raised_quad(words)
        if is_exact:
            a, b, c, d = a - RAISED, b - RAISED, c - RAISED, d - RAISED
    elif layout[0] == _FP8:
        a, b, c, d = fp8_quad(words)
    else:
        a, b, c, d = wide_integer_quad(words, layout[0] == _INT8)
    return a, b, c, d


@triton.jit
def chunk_products(
    loaded,  # see `load_outputs`
    first: tl.constexpr,  # of it: the codes of these outputs
    tiles,  # of a row; or of n rows, each for an output
    sums,  # of its chunks
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
    raised: tl.constexpr = _raised_by(layout, is_exact)
    total = tl.zeros([rows.shape[0], count], tl.float32)
    for block in tl.static_range(len(tiles) // 4):
        scales = loaded[first + 2 * block + 1]
        a, b, c, d = _expanded(loaded[first + 2 * block], is_exact, layout)
        products = a * tiles[4 * block]
        products += b * tiles[4 * block + 1]
        products += c * tiles[4 * block + 2]
        products += d * tiles[4 * block + 3]
        of_chunks = sums_of_chunks(products, chunk // 4)
        if has_offset(layout, is_exact):
            if layout[5]:
                zeros = chunk_zeros(packed, scales, rows, block * block_inputs, count, chunk, layout)
                of_chunks -= (zeros + raised) * sums[block]
            else:
                of_chunks -= (layout[4] + raised) * sums[block]
        total += of_chunks * scales
    return total
