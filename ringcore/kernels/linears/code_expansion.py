"""Codes of 4 and 8 bits as numbers, in few instructions: tiles of codes -> tiles of numbers.

A conversion from an integer has a small fraction of the rate of other instructions, so none is used: with the right
bits above it a code is the mantissa of a float, and what these bits add is subtracted. A 4-bit code is so 128 + code in
bfloat16 or 1024 + code in float16; the three bits of e2m1 are exponent and mantissa of a bfloat16 that is 2^126 times
too small. 4-bit codes are expanded 8 at a time, from two words of 16 bits in a register: 7 instructions, or 11 of e2m1,
whose bits lie in a word so that three of four numbers need a shift and a mask (`packed_weight.E2M1_BITS`), and 4 for
a packed operation. What has no such instructions (the interpreter, older GPUs) expands in plain Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.packed_math import has_packed_math

__all__ = [
    "e2m1_quad",
    "fp8_numbers",
    "fp8_quad",
    "integer_quad",
    "scaled",
    "wide_e2m1_quad",
    "wide_integer_quad",
    "wide_integers",
]

_FOUR_OF_ONE = tl.constexpr("=&r,=&r,=&r,=&r,r")
_FOUR_OF_TWO = tl.constexpr("=&r,=&r,=&r,=&r,r,r")
_MULTIPLY = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


@triton.constexpr_function
def _integers(is_bfloat16, subtracted):
    """Of two words $4: their four pairs of integers plus 128, or 1024, less `subtracted`."""
    above, kind = (0x43004300, "bf16x2") if is_bfloat16 else (0x64006400, "f16x2")
    lines = [f"{{ .reg .b32 moved, less; mov.b32 less, {subtracted};"]
    for i in range(4):
        source = "$4" if i == 0 else "moved"
        if i > 0:
            lines.append(f"shr.u32 moved, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {source}, 0x000f000f, {above:#x}, 0xea;")  # a & b | c
        lines.append(f"sub.rn.{kind} ${i}, ${i}, less;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _pair_of(is_bfloat16, zero):
    """Two of 128 + zero, or of 1024 + zero, as a constant."""
    return f"{((0x4300 if is_bfloat16 else 0x6400) + zero) * 0x10001:#x}"


_FLOATS = tl.constexpr(
    """{ .reg .b32 moved; and.b32 $0, $4, 0x81c081c0;
    shl.b32 moved, $4, 3; and.b32 $1, moved, 0x81c081c0;
    shl.b32 moved, $4, 6; and.b32 $2, moved, 0x81c081c0;
    shr.u32 moved, $4, 6; and.b32 $3, moved, 0x01800180;
    shr.u32 moved, $4, 5; lop3.b32 $3, moved, 0x00400040, $3, 0xea;
    shl.b32 moved, $4, 5; lop3.b32 $3, moved, 0x80008000, $3, 0xea; }"""
)


@triton.jit
def integer_quad(words, zeros, dtype: tl.constexpr, zero: tl.constexpr):
    """words: [n, m] int16 -> the numbers of their nibbles from the lowest on, less a zero, exactly: four [n, m] of
    dtype, which has 16 bits where there is packed math, or is float32. zeros: int16, broadcast to the words, or None
    for `zero`."""
    if dtype != tl.float32:
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        if zeros is None:
            asm: tl.constexpr = _integers(is_bfloat16, _pair_of(is_bfloat16, zero))
            if is_bfloat16:
                a, b, c, d = tl.inline_asm_elementwise(
                    asm, _FOUR_OF_ONE, [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
                )
            else:
                a, b, c, d = tl.inline_asm_elementwise(
                    asm, _FOUR_OF_ONE, [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
                )
        else:
            less: tl.constexpr = _integers(is_bfloat16, "$5")
            if is_bfloat16:
                offsets = (zeros + 0x4300).to(tl.int16)
                a, b, c, d = tl.inline_asm_elementwise(
                    less, _FOUR_OF_TWO, [words, offsets], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
                )
            else:
                offsets = (zeros + 0x6400).to(tl.int16)
                a, b, c, d = tl.inline_asm_elementwise(
                    less, _FOUR_OF_TWO, [words, offsets], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
                )
    else:
        offset = zero + 128.0 if zeros is None else zeros.to(tl.float32) + 128.0
        # float32s with the exponent of 128: its bits of 1 and up are 16 and up.
        wide = words.to(tl.int32)
        a = (((wide << 16) & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - offset
        b = (((wide << 12) & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - offset
        c = (((wide << 8) & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - offset
        d = (((wide << 4) & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - offset
    return a, b, c, d


@triton.jit
def e2m1_quad(words):
    """words: [n, m] int16, see `packed_weight.E2M1_BITS` -> their numbers times 2^-126: four [n, m] bfloat16. Needs
    packed math."""
    return tl.inline_asm_elementwise(
        _FLOATS, _FOUR_OF_ONE, [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
    )


@triton.jit
def wide_e2m1_quad(words):
    """As `e2m1_quad`, in float32 and as they are: the bits of float16s with a smaller exponent."""
    wide = words.to(tl.int32)
    a = (wide & 0x8000) | ((wide << 3) & 0xE00)
    b = ((wide << 3) & 0x8000) | ((wide << 6) & 0xE00)
    c = ((wide << 6) & 0x8000) | ((wide << 9) & 0xE00)
    d = ((wide << 5) & 0x8000) | ((wide >> 3) & 0xC00) | ((wide >> 2) & 0x200)
    return _of_half(a), _of_half(b), _of_half(c), _of_half(d)


@triton.jit
def _of_half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def scaled(numbers, scales):
    """The product in their dtype, of 16 bits only where there is packed math; scales are broadcast to the numbers."""
    if numbers.dtype == tl.bfloat16:
        product = tl.inline_asm_elementwise(_MULTIPLY, "=r,r,r", [numbers, scales], tl.bfloat16, True, 2)
    else:
        product = numbers * scales
    return product


@triton.jit
def wide_integers(codes, is_signed: tl.constexpr):
    """codes: [n, m] uint8, of signed or unsigned integers -> [n, m] float32."""
    return _wide_integer(codes.to(tl.int32), is_signed)


@triton.jit
def _wide_integer(bytes, is_signed: tl.constexpr):
    """By float32s with the exponent of 2^23."""
    sign: tl.constexpr = 128 if is_signed else 0
    return ((bytes ^ sign) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + sign)


_HALVES = tl.constexpr(
    """{ .reg .b16 low, high; .reg .b32 first, second; .reg .f16 a, b, c, d;
    mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first; mov.b32 {c, d}, second;
    cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"""
)


@triton.jit
def fp8_quad(words):
    """words: [n, m] int32, of four codes of float8_e4m3fn -> these from the lowest on: four [n, m] float32. By float16,
    to which two are converted by one instruction, and from which a conversion is as fast as an addition."""
    if has_packed_math():
        a, b, c, d = tl.inline_asm_elementwise(
            _HALVES, "=&f,=&f,=&f,=&f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
    else:
        a, b = fp8_numbers(words & 0xFF), fp8_numbers((words >> 8) & 0xFF)
        c, d = fp8_numbers((words >> 16) & 0xFF), fp8_numbers((words >> 24) & 0xFF)
    return a, b, c, d


@triton.jit
def wide_integer_quad(words, is_signed: tl.constexpr):
    """words: [n, m] int32, of four signed or unsigned bytes -> these from the lowest on: four [n, m] float32."""
    return (
        _wide_integer(words & 0xFF, is_signed),
        _wide_integer((words >> 8) & 0xFF, is_signed),
        _wide_integer((words >> 16) & 0xFF, is_signed),
        _wide_integer((words >> 24) & 0xFF, is_signed),
    )


@triton.jit
def _half_of_fp8(codes):
    wide = codes.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def fp8_numbers(codes):
    """codes: [n, m] uint8, or without packed math in any integers, of float8_e4m3fn -> [n, m] float32; NaN is not kept
    everywhere."""
    if has_packed_math():
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        numbers = _half_of_fp8(codes).to(tl.float32) * 256.0
    return numbers
