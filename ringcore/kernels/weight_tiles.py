"""Tiles of quantized weights, expanded as they are loaded: what the kernels of linears and of experts share.

A number is (code - zero) * scale. Codes lie along the inputs of an output:

BYTES     a byte a number: FP8, INT8, or unsigned
NIBBLES   four numbers a word of 16 bits, unsigned or e2m1: of every 4 * run inputs the first `run` are the lowest
          nibbles of `run` words, and so on to the highest ones

A tile of words is so four tiles of numbers, of inputs that are `run` apart, and none are interleaved: x is loaded
likewise. How codes become numbers: `code_expansion`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ringcore.kernels.code_expansion import (
    e2m1_quad,
    fp8_numbers,
    has_packed_math,
    integer_quad,
    scaled,
    wide_e2m1_quad,
    wide_integers,
)
from ringcore.kernels.packed_weight import BYTES_FP8, BYTES_INT8, DENSE, NIBBLES, NIBBLES_E2M1, PackedWeight
from ringcore.kernels.weight_groups import (
    are_alike,
    has_one_group,
    has_quads,
    moved_scales,
    scales_of,
    zeros_in,
    zeros_of,
)

__all__ = [
    "load_codes",
    "load_packed",
    "load_quad",
    "packed_dot",
    "rescaled",
    "spread_columns",
    "tile_arguments",
]

_FP8, _INT8 = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8)
_NIBBLES, _E2M1 = tl.constexpr(NIBBLES), tl.constexpr(NIBBLES_E2M1)
# Up to so many rows a group's scale multiplies sums, which are then fewer than the weights of a tile.
_MAX_SCALED_SUMS = tl.constexpr(32)


def tile_arguments(weight: torch.Tensor | PackedWeight, are_numbers: bool = False) -> dict[str, Any]:
    """What the kernels take of a weight, by name; a dense one has no scales. are_numbers: its codes are FP8 numbers,
    which are multiplied as they are."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight, "packed": (), "layout": (DENSE,)}
    zeros = weight.scales if weight.zeros is None else weight.zeros
    has_zeros = weight.zeros is not None or weight.has_zero_bits
    packed = (
        weight.scales,
        zeros,
        weight.scales if weight.index is None else weight.index,
        weight.row_stride,
        *weight.scales.stride(),
        *zeros.stride(),
    )
    layout = (
        weight.form,
        weight.scales.shape[1],
        weight.group_size,
        weight.group_offset,
        weight.zero,
        has_zeros,
        weight.index is not None,
        weight.run,
    )
    codes = weight.codes.view(torch.float8_e4m3fn) if are_numbers else weight.codes
    return {"weight": codes, "packed": packed, "layout": layout}


@triton.jit
def spread_columns(words, layout: tl.constexpr):
    """words: int, places along the inputs -> the inputs of their lowest nibbles; those of the others are 1, 2 and 3
    times `run` on."""
    run: tl.constexpr = layout[7]
    return words // run * (4 * run) + words % run


@triton.jit
def add_packed_product(
    total,  # [n, rows] float32
    x,  # [1, rows] pointers to the first input of each row
    codes,
    packed,  # see `tile_arguments`
    rows,  # [n] int, the outputs
    at,  # int, the first input, a multiple of block_inputs
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_whole: tl.constexpr,  # block_inputs divides num_inputs
    layout: tl.constexpr,  # see `tile_arguments`
):
    """total plus the product of a tile of weights with as many inputs of x; after the last one comes `rescaled`.

    Of few rows and a tile of one group the codes' numbers are multiplied, exactly, and their sums by the scale.
    Otherwise weights are rounded to x's dtype, and 4-bit ones are products of scales in that dtype where there is
    packed math.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    scales_sums: tl.constexpr = (
        layout[0] != _E2M1 and has_one_group(layout, block_inputs) and total.shape[1] <= _MAX_SCALED_SUMS
    )
    sums = tl.zeros(total.shape, tl.float32) if scales_sums else total
    if has_quads(layout):
        run: tl.constexpr = layout[7]
        inputs = at + spread_columns(tl.arange(0, block_inputs // 4), layout)
        a, b, c, d, scales = load_quad(
            *(codes, packed, rows, at, num_inputs, block_inputs, is_whole, dtype, not scales_sums, layout)
        )
        sums = tl.dot(a.to(dtype), _load_rows(x, inputs, num_inputs, is_whole), sums, input_precision="ieee")
        sums = tl.dot(b.to(dtype), _load_rows(x, inputs + run, num_inputs, is_whole), sums, input_precision="ieee")
        sums = tl.dot(c.to(dtype), _load_rows(x, inputs + 2 * run, num_inputs, is_whole), sums, input_precision="ieee")
        sums = tl.dot(d.to(dtype), _load_rows(x, inputs + 3 * run, num_inputs, is_whole), sums, input_precision="ieee")
    else:
        inputs = at + tl.arange(0, block_inputs)
        w = load_packed(codes, packed, rows, at, num_inputs, block_inputs, is_whole, not scales_sums, layout)
        sums = tl.dot(w.to(dtype), _load_rows(x, inputs, num_inputs, is_whole), sums, input_precision="ieee")
        scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout)
    if scales_sums:
        total += sums * scales
    else:
        total = sums
    return total


@triton.jit
def packed_dot(
    total,
    x,
    codes,
    packed,
    rows,
    first,  # int, of the inputs
    last,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    num_stages: tl.constexpr,
    is_whole: tl.constexpr,
    layout: tl.constexpr,
):
    """`add_packed_product` of all blocks from `first` to `last`, `rescaled`."""
    for at in tl.range(first, last, block_inputs, num_stages=num_stages):
        total = add_packed_product(total, x, codes, packed, rows, at, num_inputs, block_inputs, is_whole, layout)
    return rescaled(total, x.dtype.element_ty, layout)


@triton.jit
def rescaled(total, dtype: tl.constexpr, layout: tl.constexpr):
    """The sums of `add_packed_product` as they are meant. dtype: of x."""
    if layout[0] == _E2M1 and has_packed_math() and dtype == tl.bfloat16:
        total *= 9223372036854775808.0  # 2^MOVED
    return total


@triton.jit
def load_packed(
    codes,
    packed,
    rows,
    at,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_whole: tl.constexpr,
    is_scaled: tl.constexpr,
    layout: tl.constexpr,
):
    """Of bytes: [n, block_inputs] float32; inputs out of bounds are finite numbers, to be multiplied by 0. is_scaled:
    else without their scales. Arguments as of `add_packed_product`."""
    found = load_codes(codes, packed, rows, at, block_inputs, 1, num_inputs, is_whole)
    inputs = at + tl.arange(0, block_inputs)
    if layout[0] == _FP8:
        numbers = fp8_numbers(found)
    else:
        numbers = wide_integers(found, layout[0] == _INT8)
    if layout[5]:
        numbers -= zeros_of(packed, rows, at, inputs, num_inputs, block_inputs, layout).to(tl.float32)
    elif layout[4] != 0:
        numbers -= layout[4]
    if is_scaled:
        numbers *= scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout)
    return numbers


@triton.jit
def load_quad(
    codes,
    packed,
    rows,
    at,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_whole: tl.constexpr,
    dtype: tl.constexpr,
    is_scaled: tl.constexpr,
    layout: tl.constexpr,
):
    """Of nibbles: four tiles [n, block_inputs / 4], otherwise as `load_packed`. In dtype where there is packed math for
    it, e2m1 then times 2^-MOVED; else in float32. And the scales of the first tile, as `_of_groups`."""
    run: tl.constexpr = layout[7]
    words = load_codes(codes, packed, rows, at // 4, block_inputs // 4, 4, num_inputs, is_whole)
    inputs = at + spread_columns(tl.arange(0, block_inputs // 4), layout)
    math: tl.constexpr = dtype if has_packed_math() else tl.float32
    if layout[0] == _E2M1:
        if math == tl.bfloat16:
            a, b, c, d = e2m1_quad(words)
            scales = moved_scales(packed, rows, at, inputs, num_inputs, block_inputs, layout)
        else:
            a, b, c, d = wide_e2m1_quad(words)
            scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout)
        a, b, c, d = scaled(a, scales), scaled(b, scales), scaled(c, scales), scaled(d, scales)
    elif are_alike(layout):
        scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout)
        a, b, c, d = integer_quad(words, zeros_in(scales, layout), math, layout[4])
        if is_scaled:
            s = scales.to(math)
            a, b, c, d = scaled(a, s), scaled(b, s), scaled(c, s), scaled(d, s)
    else:  # only the one of the four that is meant is computed
        scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout)
        a, _, _, _ = integer_quad(words, zeros_in(scales, layout), tl.float32, layout[4])
        a *= scales
        scales = scales_of(packed, rows, at, inputs + run, num_inputs, block_inputs, layout)
        _, b, _, _ = integer_quad(words, zeros_in(scales, layout), tl.float32, layout[4])
        b *= scales
        scales = scales_of(packed, rows, at, inputs + 2 * run, num_inputs, block_inputs, layout)
        _, _, c, _ = integer_quad(words, zeros_in(scales, layout), tl.float32, layout[4])
        c *= scales
        scales = scales_of(packed, rows, at, inputs + 3 * run, num_inputs, block_inputs, layout)
        _, _, _, d = integer_quad(words, zeros_in(scales, layout), tl.float32, layout[4])
        d *= scales
    return a, b, c, d, scales


@triton.jit
def load_codes(
    codes,
    packed,
    rows,
    first,
    count: tl.constexpr,
    each: tl.constexpr,
    num_inputs: tl.constexpr,
    is_whole: tl.constexpr,
):
    """[n, count] of the codes' dtype, which has the numbers of `each` inputs, from the one `first` on, a multiple of
    count; out of bounds 0."""
    places = tl.multiple_of(first + tl.arange(0, count), count)
    pointers = codes + (rows.to(tl.int64) * packed[3])[:, None] + places[None, :]
    if is_whole:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=places[None, :] < (num_inputs + each - 1) // each, other=0)
    return found


@triton.jit
def _load_rows(x, inputs, num_inputs: tl.constexpr, is_whole: tl.constexpr):
    """[inputs, rows] of x; out of bounds 0."""
    if is_whole:
        found = tl.load(x + inputs[:, None])
    else:
        found = tl.load(x + inputs[:, None], mask=inputs[:, None] < num_inputs, other=0.0)
    return found
