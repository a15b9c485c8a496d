"""Tiles of codes as they are loaded and expanded to numbers, see `weight_tiles`.

Arguments of all: `packed` and `layout` as of `weight_tiles.tile_arguments`; rows [n] int, the outputs; at, the first
input; loaded: the tile's scales, as of `weight_groups.load_scales`, None where they are not loaded yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.code_expansion import (
    e2m1_quad,
    fp8_numbers,
    integer_quad,
    scaled,
    wide_e2m1_quad,
    wide_integers,
)
from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES_E2M1, TILE_OUTPUTS, TILE_WORDS
from ringcore.kernels.linears.tile_load import NORMAL_EVICTION
from ringcore.kernels.linears.weight_groups import are_alike, moved_scales, scales_of, zeros_in, zeros_of
from ringcore.kernels.packed_math import has_packed_math

__all__ = ["load_codes", "load_packed", "load_quad", "spread_columns"]

_FP8, _INT8, _E2M1 = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8), tl.constexpr(NIBBLES_E2M1)
_TILE_OUTPUTS, _TILE_WORDS = tl.constexpr(TILE_OUTPUTS), tl.constexpr(TILE_WORDS)


@triton.jit
def spread_columns(words, layout: tl.constexpr):
    """words: int, places along the inputs -> the inputs of their lowest nibbles; those of the others are 1, 2 and 3
    times `run` on."""
    run: tl.constexpr = layout[7]
    return words // run * (4 * run) + words % run


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
    loaded=None,
):
    """Of bytes: [n, block_inputs] float32; inputs out of bounds are finite numbers, to be multiplied by 0. is_scaled:
    else without their scales. Arguments as of `add_packed_product`."""
    found = load_codes(codes, packed, rows.to(tl.int64), at, block_inputs, 1, num_inputs, is_whole)
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
        numbers *= scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
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
    loaded=None,
):
    """Of nibbles: four tiles [n, block_inputs / 4], otherwise as `load_packed`. In dtype where there is packed math for
    it, e2m1 then times 2^-MOVED; else in float32. And the scales of the first tile, as `_of_groups`."""
    run: tl.constexpr = layout[7]
    words = load_codes(codes, packed, rows.to(tl.int64), at // 4, block_inputs // 4, 4, num_inputs, is_whole, layout[8])
    inputs = at + spread_columns(tl.arange(0, block_inputs // 4), layout)
    math: tl.constexpr = dtype if has_packed_math() else tl.float32
    if layout[0] == _E2M1:
        if math == tl.bfloat16:
            a, b, c, d = e2m1_quad(words)
            scales = moved_scales(packed, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
        else:
            a, b, c, d = wide_e2m1_quad(words)
            scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
        a, b, c, d = scaled(a, scales), scaled(b, scales), scaled(c, scales), scaled(d, scales)
    elif are_alike(layout):
        scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
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
    is_tiled: tl.constexpr = False,
    eviction: tl.constexpr = NORMAL_EVICTION,
):
    """[n, count] of the codes' dtype, which has the numbers of `each` inputs, from the one `first` on, a multiple of
    count; out of bounds 0. rows: int64 where the codes have 2^31 entries. eviction: see `tile_load`."""
    places = tl.multiple_of(first + tl.arange(0, count), count)
    if is_tiled:
        size: tl.constexpr = _TILE_OUTPUTS * _TILE_WORDS
        word = tl.arange(0, count)
        in_block = word // _TILE_WORDS * size + word % _TILE_WORDS + first // _TILE_WORDS * size
        of_row = rows // _TILE_OUTPUTS * (_TILE_OUTPUTS * packed[3]) + rows % _TILE_OUTPUTS * _TILE_WORDS
        pointers = codes + of_row[:, None] + in_block[None, :]
    else:
        pointers = codes + (rows * packed[3])[:, None] + places[None, :]
    if is_whole:
        found = tl.load(pointers, eviction_policy=eviction)
    else:
        in_bounds = places[None, :] < (num_inputs + each - 1) // each
        found = tl.load(pointers, mask=in_bounds, other=0, eviction_policy=eviction)
    return found
