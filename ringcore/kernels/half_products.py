"""Codes of 4 and 8 bits as float16s, from words of four, and their products with float16s: two in an instruction.

Code 0 of one word and code 0 of the next are a pair, and so on. As the bits of a float16 a nibble is a subnormal
number, exactly, with which the hardware multiplies at its full rate: 8 of them take 5 instructions, where conversions
to float32 take 15. A zero is subtracted before the product, exactly: after it, a small weight of an outlier would be
the difference of two large sums, each of which was rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.code_expansion import fp8_quad, has_packed_math, wide_integer_quad

__all__ = ["NIBBLE_UNITS", "add_half_products", "fp8_halves", "integer_halves", "less_zeros", "nibble_halves"]

NIBBLE_UNITS = (2.0**-24, 2.0**-20, 2.0**-24, 2.0**-20)  # of the four of `nibble_halves`

_FOUR_OF_ONE = tl.constexpr("=&r,=&r,=&r,=&r,r")  # registers of 32 bits
_FOUR_OF_TWO = tl.constexpr("=&r,=&r,=&r,=&r,r,r")

_NIBBLES = tl.constexpr(
    """{ .reg .b32 moved; and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
    shr.u32 moved, $4, 8; and.b32 $2, moved, 0x000f000f; and.b32 $3, moved, 0x00f000f0; }"""
)


@triton.jit
def nibble_halves(words):
    """words: [n, m] int16 -> the numbers of their nibbles from the lowest on, of `NIBBLE_UNITS`: four [n, m]
    float16."""
    if has_packed_math():
        a, b, c, d = tl.inline_asm_elementwise(
            _NIBBLES, _FOUR_OF_ONE, [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        moved = (words >> 8).to(tl.int16)
        a, b = (words & 0x0F).to(tl.float16, bitcast=True), (words & 0xF0).to(tl.float16, bitcast=True)
        c, d = (moved & 0x0F).to(tl.float16, bitcast=True), (moved & 0xF0).to(tl.float16, bitcast=True)
    return a, b, c, d


_FP8_HALVES = tl.constexpr(
    """{ .reg .b32 first, second; .reg .b16 a, b, c, d;
    prmt.b32 first, $4, $5, 0x5140; prmt.b32 second, $4, $5, 0x7362;
    mov.b32 {a, b}, first; mov.b32 {c, d}, second;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
    cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }"""
)


@triton.jit
def fp8_halves(words):
    """words: [n, m] int32, of four codes of float8_e4m3fn -> these from the lowest on: four [n, m] float16."""
    if has_packed_math():
        a, b, c, d = tl.inline_asm_elementwise(
            _FP8_HALVES, _FOUR_OF_TWO, [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        a, b, c, d = fp8_quad(words)
        a, b, c, d = a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16)
    return a, b, c, d


@triton.constexpr_function
def _byte_halves(is_signed):
    """Of two words $4 and $5: 1024 + byte as float16s, less that; a signed byte has 128 more with its sign turned."""
    turned, less = (0x80808080, "0x64806480") if is_signed else (0, "0x64006400")
    return f"""{{ .reg .b32 first, second, less; mov.b32 less, {less};
    prmt.b32 first, $4, $5, 0x5140; xor.b32 first, first, {turned:#x};
    prmt.b32 second, $4, $5, 0x7362; xor.b32 second, second, {turned:#x};
    prmt.b32 $0, first, 0x64646464, 0x4140; sub.rn.f16x2 $0, $0, less;
    prmt.b32 $1, first, 0x64646464, 0x4342; sub.rn.f16x2 $1, $1, less;
    prmt.b32 $2, second, 0x64646464, 0x4140; sub.rn.f16x2 $2, $2, less;
    prmt.b32 $3, second, 0x64646464, 0x4342; sub.rn.f16x2 $3, $3, less; }}"""


@triton.jit
def integer_halves(words, is_signed: tl.constexpr):
    """words: [n, m] int32, of four signed or unsigned bytes -> these from the lowest on: four [n, m] float16."""
    if has_packed_math():
        asm: tl.constexpr = _byte_halves(is_signed)
        a, b, c, d = tl.inline_asm_elementwise(
            asm, _FOUR_OF_TWO, [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        a, b, c, d = wide_integer_quad(words, is_signed)
        a, b, c, d = a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16)
    return a, b, c, d


@triton.jit
def less_zeros(numbers, zeros):
    """Exactly, of integers of the same unit. zeros: float16, broadcast to the numbers; or None."""
    if zeros is None:
        found = numbers
    elif has_packed_math():
        found = tl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros], tl.float16, True, 2)
    else:
        found = numbers - zeros
    return found


@triton.jit
def add_half_products(total, numbers, factors):
    """total + the products in float16, [n, m], two in an instruction where there is packed math; factors are broadcast
    to the numbers. total: or None."""
    if has_packed_math():
        if total is None:
            total = tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, factors], tl.float16, True, 2
            )
        else:
            total = tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [numbers, factors, total], tl.float16, True, 2
            )
    elif total is None:
        total = numbers * factors
    else:
        total += numbers * factors
    return total
