"""Products of codes of 4 and 8 bits and float16s, two in an instruction, from words of 32 bits.

A pair is two float16s in an int32, what an instruction takes: Triton keeps 16-bit elements in registers of their own,
and moves them where two words of a load are a pair. The numbers of a word meet those of a row in the order of
`word_numbers`, and their products are added as pairs.

With the bits of 1024 above it a nibble is a float16, of which 1024 and its zero are subtracted: 8 of them take 9
instructions. That is exact, and before the product: after it, a small weight of an outlier would be the difference of
two large sums, each of which was rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.code_expansion import fp8_quad, wide_integer_quad
from ringcore.kernels.packed_math import has_packed_math

__all__ = [
    "ROUNDED_UNIT",
    "byte_products",
    "fp8_products",
    "joined_pairs",
    "nibble_products",
    "pair_of",
    "rounded_pair",
    "sums_of_words",
]

ROUNDED_UNIT = 2.0**-5  # of codes of e4m3: eight products of them and others are below 65504
_ROUNDED_UNIT = tl.constexpr(ROUNDED_UNIT)


@triton.jit
def pair_of(first, second):
    """float32 -> int32."""
    if has_packed_math():
        found = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, True, 1)
    else:
        found = _plain_pair(first.to(tl.float16), second.to(tl.float16))
    return found


_ROUNDED_PAIR = tl.constexpr(
    """{ .reg .b16 codes; .reg .b32 unit; mov.b32 unit, 0x28002800; cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
    cvt.rn.f16x2.e4m3x2 $0, codes; mul.rn.f16x2 $0, $0, unit; }"""
)


@triton.jit
def rounded_pair(first, second):
    """As `pair_of`, of the nearest numbers of e4m3, times 2^-5."""
    if has_packed_math():
        found = tl.inline_asm_elementwise(_ROUNDED_PAIR, "=r,f,f", [first, second], tl.int32, True, 1)
    else:
        of_first, of_second = first.to(tl.float8e4nv).to(tl.float16), second.to(tl.float8e4nv).to(tl.float16)
        found = _plain_pair(of_first * _ROUNDED_UNIT, of_second * _ROUNDED_UNIT)
    return found


@triton.jit
def _plain_pair(first, second):
    low, high = first.to(tl.int16, bitcast=True).to(tl.int32), second.to(tl.int16, bitcast=True).to(tl.int32)
    return (high << 16) | (low & 0xFFFF)


@triton.jit
def joined_pairs(first, second):
    """int64: a word's two pairs, or half of its four."""
    return (second.to(tl.int64) << 32) | (first.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _half(pairs, index: tl.constexpr):
    """float16: one of the two or four."""
    return ((pairs >> (16 * index)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


_NIBBLES = tl.constexpr(
    """{ .reg .b32 moved, n, a, b, c, d; mov.b64 {a, b}, $4; mov.b64 {c, d}, $5; shr.u32 moved, $1, 8;
    lop3.b32 n, $1, 0x000f000f, 0x64006400, 0xea; sub.rn.f16x2 n, n, $2; mul.rn.f16x2 $0, n, a;
    lop3.b32 n, $1, 0x00f000f0, 0x64006400, 0xea; sub.rn.f16x2 n, n, $3; fma.rn.f16x2 $0, n, b, $0;
    lop3.b32 n, moved, 0x000f000f, 0x64006400, 0xea; sub.rn.f16x2 n, n, $2; fma.rn.f16x2 $0, n, c, $0;
    lop3.b32 n, moved, 0x00f000f0, 0x64006400, 0xea; sub.rn.f16x2 n, n, $3; fma.rn.f16x2 $0, n, d, $0; }"""
)


@triton.jit
def nibble_products(words, zeros, x, y):
    """The sums of four products: pairs. words: int32 of eight nibbles; zeros: int32, broadcast to them; x, y: int64, of
    which each second pair meets numbers times 16."""
    if has_packed_math():
        first, second = (zeros + 0x6400) * 0x10001, ((zeros << 4) + 0x6400) * 0x10001
        sums = tl.inline_asm_elementwise(_NIBBLES, "=&r,r,r,r,l,l", [words, first, second, x, y], tl.int32, True, 1)
    else:
        sums = _plain_pair(_plain_nibbles(words, zeros, x, y, 0), _plain_nibbles(words >> 16, zeros, x, y, 1))
    return sums


@triton.jit
def _plain_nibbles(words, zeros, x, y, half: tl.constexpr):
    a, b = (words & 15) - zeros, ((words >> 4) & 15) - zeros
    c, d = ((words >> 8) & 15) - zeros, ((words >> 12) & 15) - zeros
    sums = a.to(tl.float16) * _half(x, half) + (b << 4).to(tl.float16) * _half(x, half + 2)
    sums += c.to(tl.float16) * _half(y, half)
    return sums + (d << 4).to(tl.float16) * _half(y, half + 2)


_FP8 = tl.constexpr(
    """{ .reg .b16 low, high; .reg .b32 n, a, b; mov.b32 {low, high}, $1; mov.b64 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 n, low; mul.rn.f16x2 $0, n, a; cvt.rn.f16x2.e4m3x2 n, high; fma.rn.f16x2 $0, n, b, $0; }"""
)


@triton.jit
def fp8_products(words, x):
    """The sums of two products: pairs. words: int32 of four codes of float8_e4m3fn; x: int64."""
    if has_packed_math():
        sums = tl.inline_asm_elementwise(_FP8, "=&r,r,l", [words, x], tl.int32, True, 1)
    else:
        a, b, c, d = fp8_quad(words)
        sums = _plain_sums(a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16), x)
    return sums


@triton.jit
def _plain_sums(a, b, c, d, x):
    return _plain_pair(a * _half(x, 0) + c * _half(x, 2), b * _half(x, 1) + d * _half(x, 3))


@triton.constexpr_function
def _of_bytes(is_signed):
    """1024 + byte as float16s, less $2; a signed byte has 128 more with its sign turned."""
    turned = "xor.b32 w, w, 0x80808080;" if is_signed else ""
    return f"""{{ .reg .b32 w, n, a, b; mov.b64 {{a, b}}, $3; mov.b32 w, $1; {turned}
    prmt.b32 n, w, 0x64646464, 0x4140; sub.rn.f16x2 n, n, $2; mul.rn.f16x2 $0, n, a;
    prmt.b32 n, w, 0x64646464, 0x4342; sub.rn.f16x2 n, n, $2; fma.rn.f16x2 $0, n, b, $0; }}"""


@triton.jit
def byte_products(words, zeros, x, is_signed: tl.constexpr):
    """As `fp8_products`, of signed or unsigned bytes less zeros, int32."""
    if has_packed_math():
        offsets = (zeros + (0x6480 if is_signed else 0x6400)) * 0x10001
        asm: tl.constexpr = _of_bytes(is_signed)
        sums = tl.inline_asm_elementwise(asm, "=&r,r,r,l", [words, offsets, x], tl.int32, True, 1)
    else:
        a, b, c, d = wide_integer_quad(words, is_signed)
        a, b, c, d = a - zeros, b - zeros, c - zeros, d - zeros
        sums = _plain_sums(a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16), x)
    return sums


_WIDE_SUM = tl.constexpr(
    """{ .reg .f16 low, high; .reg .f32 a, b; mov.b32 {low, high}, $1;
    cvt.f32.f16 a, low; cvt.f32.f16 b, high; add.f32 $0, a, b; }"""
)


@triton.jit
def sums_of_words(pairs):
    """[n, chunks, 4] int32 -> [n, chunks] float32: four pairs are added in float16, the two sums in float32."""
    even, odd = tl.split(tl.reshape(pairs, [pairs.shape[0], pairs.shape[1], 2, 2]))
    a, b = tl.split(_added(even, odd))
    total = _added(a, b)
    if has_packed_math():
        found = tl.inline_asm_elementwise(_WIDE_SUM, "=f,r", [total], tl.float32, True, 1)
    else:
        found = _half(total, 0).to(tl.float32) + _half(total, 1).to(tl.float32)
    return found


@triton.jit
def _added(first, second):
    if has_packed_math():
        found = tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [first, second], tl.int32, True, 1)
    else:
        found = _plain_pair(_half(first, 0) + _half(second, 0), _half(first, 1) + _half(second, 1))
    return found
