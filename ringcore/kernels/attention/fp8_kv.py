"""The numbers of `fp8_rows` in Triton: rounded as they are written, and multiplied in tiles as they are read.

For few queries, as decodes have, codes are multiplied as float16, which has every number of e4m3 and to which the
hardware expands two of an instruction; so are queries, which are infinite from 65,520 on. The powers of 2 are kept out
of it: those of keys scale the scores, and those of values the weights, relative to the largest of the tile, so that no
weight is out of float16's range. For many queries, and in float32, keys and values are expanded to the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.attention.row_dot import dot_of_rows, load_factor
from ringcore.kernels.packed_math import has_packed_math, power_of_2

__all__ = [
    "PAIRS_TO_HALVES",
    "dims_of_columns",
    "expand_codes",
    "load_exponents",
    "multiplies_codes",
    "round_row",
    "weighted_codes",
]

_WIDE = tl.constexpr(128)  # numbers of a head
_SHARED_MEMORY_ROWS = 64  # from here on tensor cores read both factors in shared memory


@triton.jit
def round_row(numbers, largest: tl.constexpr):
    """[rows, width] float32, zeros after a row's end -> codes [rows, width] and exponents [rows], uint8: `to_rows`.

    largest: `fp8_rows.largest_number`.
    """
    numbers = tl.where(numbers == numbers, tl.minimum(tl.maximum(numbers, -largest), largest), 0.0)
    bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True)
    exponents = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    codes = _nearest_code(numbers * power_of_2(254 - exponents)[:, None]).to(tl.float8e4nv)
    return codes.to(tl.uint8, bitcast=True), exponents.to(tl.uint8)


@triton.jit
def _nearest_code(numbers):
    """The nearest number of e4m3, of two the even one, so that the conversion is exact: the interpreter's is off.

    Added to 1.5 * 2^(e + 20), a number is rounded to a multiple of 2^(e - 3). e is its own exponent, -6 at least.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    shifter = (tl.maximum((bits >> 23) & 255, 121) + 20) << 23 | 0x400000
    shifter = shifter.to(tl.float32, bitcast=True)
    nearest = (numbers + shifter - shifter).to(tl.int32, bitcast=True)
    return (nearest | (bits & -0x80000000)).to(tl.float32, bitcast=True)  # of a zero too


@triton.jit
def expand_codes(codes, dtype: tl.constexpr):
    """uint8 -> the same numbers in float16 or float32."""
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def load_exponents(tokens, block_size: tl.constexpr):
    """Of keys and of values, [n] int32. tokens: pointers to the byte of each key; those of a block, from its first on,
    begin at a multiple of 4.

    Words of four are loaded: a byte alone cannot be copied to shared memory asynchronously, and a loop would wait for
    it.
    """
    address = tokens.to(tl.int64)
    shift = (address % 4 * 8).to(tl.int32)
    words = (address // 4 * 4).to(tl.pointer_type(tl.int32))
    return (tl.load(words) >> shift) & 255, (tl.load(words + block_size // 4) >> shift) & 255


PAIRS_TO_HALVES = tl.constexpr(
    """{ .reg .b32 sorted; .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"""
)


@triton.jit
def expand_pairs(pairs):
    """int16, two codes -> the lower and the higher ones' numbers, float16."""
    if has_packed_math():
        even, odd = tl.inline_asm_elementwise(PAIRS_TO_HALVES, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2)
    else:
        even = expand_codes((pairs & 255).to(tl.uint8), tl.float16)
        odd = expand_codes(((pairs >> 8) & 255).to(tl.uint8), tl.float16)
    return even, odd


@triton.constexpr_function
def multiplies_codes(num_rows, dtype):
    """Whether a tile of so many rows of queries in `dtype` is multiplied by codes."""
    return num_rows < _SHARED_MEMORY_ROWS and dtype != tl.float32


@triton.jit
def dims_of_columns(num_rows: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr, is_fp8: tl.constexpr):
    """Of which number of a value each column of a sum by `attend_tile` is, [width]."""
    column = tl.arange(0, width)
    if is_fp8 and multiplies_codes(num_rows, dtype) and width >= _WIDE:
        column = column % (width // 2) * 2 + column // (width // 2)
    return column


@triton.jit
def weighted_codes(weights, tokens, head_size: tl.constexpr, width: tl.constexpr):
    """weights [rows, n] float16 @ codes [n, width], with columns as in `dims_of_columns`. tokens: [n] pointers to each
    token's first of `head_size` codes.

    A tensor core takes two tokens of a column in one register, and in shared memory the neighbours of a code are of its
    token. So of a wide head words of two codes are read, half the reads, and multiplied as two products, each of every
    second column. They stay in this order: to interleave them would be a way through shared memory for each tile. A
    narrow head would have too few columns for it all.
    """
    rows: tl.constexpr = weights.shape[0]
    if width < _WIDE:
        dim = tl.arange(0, width)[None, :]
        codes = load_factor(tokens[:, None] + dim, None if width == head_size else dim < head_size, rows)
        return dot_of_rows(weights, expand_codes(codes, tl.float16), tl.zeros([rows, width], tl.float32))
    pair = tl.arange(0, width // 2)[None, :]
    source = tokens.to(tl.pointer_type(tl.int16))[:, None] + pair
    even, odd = expand_pairs(load_factor(source, None if width == head_size else pair < head_size // 2, rows))
    zeros = tl.zeros([rows, width // 2], tl.float32)
    products = tl.join(dot_of_rows(weights, even, zeros), dot_of_rows(weights, odd, zeros))  # [rows, width // 2, 2]
    return products.permute(0, 2, 1).reshape(rows, width)
