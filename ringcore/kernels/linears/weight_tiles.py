"""Tiles of quantized weights, expanded as they are loaded: what the kernels of linears and of experts share.

A number is (code - zero) * scale. Codes lie along the inputs of an output:

BYTES     a byte a number: FP8, INT8, or unsigned
NIBBLES   four numbers a word of 16 bits, unsigned or e2m1: of every 4 * run inputs the first `run` are the lowest
          nibbles of `run` words, and so on to the highest ones

A tile of words is so four tiles of numbers, of inputs that are `run` apart, and none are interleaved: x is loaded
likewise, `run` inputs at a time. From 16 on these are whole sectors of the L2 cache, whose bandwidth bounds many rows:
256 rows times 2 x 12,288 gated outputs of 4,096 inputs take 236 us on an H200 with runs of 8, 139 with 16, 103 with 32.
How codes become numbers: `code_expansion`.

Words lie along the inputs of an output, or `is_tiled`: those of 64 outputs and 64 inputs are consecutive, 2 KB, so that
a program reads long runs of memory where outputs would give it 64 bytes each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from ringcore.kernels.linears.packed_weight import DENSE, NIBBLES_E2M1, PackedWeight
from ringcore.kernels.linears.weight_groups import are_compact, has_one_group, has_quads, load_scales, scales_of
from ringcore.kernels.linears.weight_loads import load_packed, load_quad, spread_columns
from ringcore.kernels.packed_math import has_packed_math

__all__ = ["packed_dot", "rescaled", "tile_arguments"]

_E2M1 = tl.constexpr(NIBBLES_E2M1)
# Up to so many rows a group's scale multiplies sums, which are then fewer than the weights of a tile.
_MAX_SCALED_SUMS = tl.constexpr(32)
_MIN_MATRIX_ROWS = tl.constexpr(64)  # for which four tiles of nibbles are one matrix
_ASYNC_BYTES = 4  # of a thread, the least that are copied asynchronously


def tile_arguments(weight: torch.Tensor | PackedWeight, are_numbers: bool = False) -> dict[str, Any]:
    """What the kernels take of a weight, by name; a dense one has no scales. are_numbers: its codes are FP8 numbers,
    which are multiplied as they are."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight, "packed": (), "layout": (DENSE,)}
    zeros = weight.scales if weight.zeros is None else weight.zeros
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
        weight.has_zeros,
        weight.index is not None,
        weight.run,
        weight.is_tiled,
        weight.scale_run,
    )
    codes = weight.codes.view(torch.float8_e4m3fn) if are_numbers else weight.codes
    return {"weight": codes, "packed": packed, "layout": layout}


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
    is_row,  # [1, rows] bool, others are taken as 0; None where all are
    loaded,  # the tile's scales, as of `load_scales`, or None
):
    """total plus the product of a tile of weights with as many inputs of x; after the last one comes `rescaled`.

    Of few rows and a tile of one group the codes' numbers are multiplied, exactly, and their sums by the scale.
    Otherwise weights are rounded to x's dtype, and 4-bit ones are products of scales in that dtype where there is
    packed math. The four tiles of nibbles are one matrix where a warp group takes it by wgmma, of which a thread has
    the same numbers: it waits once, not four times. Two warp groups, or few rows, wait for less than that by turns, and
    threads of fewer warps would exchange numbers.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    scales_sums: tl.constexpr = (
        layout[0] != _E2M1 and has_one_group(layout, block_inputs) and total.shape[1] <= _MAX_SCALED_SUMS
    )
    sums = tl.zeros(total.shape, tl.float32) if scales_sums else total
    if has_quads(layout):
        a, b, c, d, scales = load_quad(
            *(codes, packed, rows, at, num_inputs, block_inputs, is_whole, dtype, not scales_sums, layout, loaded)
        )
        run: tl.constexpr = layout[7]
        if total.shape[1] < _MIN_MATRIX_ROWS or (has_packed_math() and (num_warps() != 4 or dtype == tl.float32)):
            inputs = at + spread_columns(tl.arange(0, block_inputs // 4), layout)
            x_a = _load_rows(x, inputs, num_inputs, is_whole, is_row)
            x_b = _load_rows(x, inputs + run, num_inputs, is_whole, is_row)
            x_c = _load_rows(x, inputs + 2 * run, num_inputs, is_whole, is_row)
            x_d = _load_rows(x, inputs + 3 * run, num_inputs, is_whole, is_row)
            sums = tl.dot(a.to(dtype), x_a, sums, input_precision="ieee")
            sums = tl.dot(b.to(dtype), x_b, sums, input_precision="ieee")
            sums = tl.dot(c.to(dtype), x_c, sums, input_precision="ieee")
            sums = tl.dot(d.to(dtype), x_d, sums, input_precision="ieee")
        else:
            place = tl.arange(0, block_inputs)
            quarter: tl.constexpr = block_inputs // 4
            inputs = at + spread_columns(place % quarter, layout) + place // quarter * run
            inputs = tl.max_contiguous(tl.multiple_of(inputs, run), run)
            rows_of_x = _load_rows(x, inputs, num_inputs, is_whole, is_row)
            sums = tl.dot(_concatenated(a, b, c, d).to(dtype), rows_of_x, sums, input_precision="ieee")
    else:
        inputs = at + tl.arange(0, block_inputs)
        w = load_packed(codes, packed, rows, at, num_inputs, block_inputs, is_whole, not scales_sums, layout, loaded)
        rows_of_x = _load_rows(x, inputs, num_inputs, is_whole, is_row)
        sums = tl.dot(w.to(dtype), rows_of_x, sums, input_precision="ieee")
        scales = scales_of(packed, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
    if scales_sums:
        total += sums * scales
    else:
        total = _waited_for(sums)
    return total


@triton.constexpr_function
def _has_few_exponents(layout, num_outputs, block_inputs, num_warps):
    if layout[0] != NIBBLES_E2M1 or not are_compact(layout, block_inputs):
        return False
    return num_outputs * (block_inputs // layout[2]) < _ASYNC_BYTES * 32 * num_warps


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
    is_row=None,
):
    """`add_packed_product` of all blocks from `first` to `last`, `rescaled`. Exponents are loaded a block ahead where
    they are too few bytes of a thread for asynchronous copies, which the compiler makes of the other loads."""
    if has_packed_math() and _has_few_exponents(layout, rows.shape[0], block_inputs, num_warps()):
        ahead = load_scales(packed, rows, first, block_inputs, layout)
        for at in tl.range(first, last, block_inputs, num_stages=num_stages):
            loaded = ahead
            ahead = load_scales(packed, rows, at + block_inputs, block_inputs, layout)
            total = add_packed_product(
                *(total, x, codes, packed, rows, at, num_inputs, block_inputs, is_whole, layout, is_row, loaded)
            )
    else:
        for at in tl.range(first, last, block_inputs, num_stages=num_stages):
            total = add_packed_product(
                *(total, x, codes, packed, rows, at, num_inputs, block_inputs, is_whole, layout, is_row, None)
            )
    return rescaled(total, x.dtype.element_ty, layout)


@triton.jit
def _concatenated(a, b, c, d):
    """Four [n, m] -> [n, 4 * m]."""
    quads = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(quads, (0, 3, 2, 1)), [a.shape[0], 4 * a.shape[1]])


@triton.jit
def rescaled(total, dtype: tl.constexpr, layout: tl.constexpr):
    """The sums of `add_packed_product` as they are meant. dtype: of x."""
    if layout[0] == _E2M1 and has_packed_math() and dtype == tl.bfloat16:
        total *= 9223372036854775808.0  # 2^MOVED
    return total


@triton.jit
def _waited_for(sums):
    """The sums of `tl.dot`, whose tensor cores have read their operands: any use but by another dot waits for that.
    Without it Triton 3.6 and 3.7 begin the next round of a pipelined loop while a wgmma reads weights from registers,
    and ptxas gives these to others."""
    if has_packed_math():
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _load_rows(x, inputs, num_inputs: tl.constexpr, is_whole: tl.constexpr, is_row):
    """[inputs, rows] of x; out of bounds 0."""
    pointers = x + inputs[:, None]
    if is_whole:
        if is_row is None:
            found = tl.load(pointers)
        else:
            found = tl.load(pointers, mask=is_row, other=0.0)
    else:
        in_bounds = inputs[:, None] < num_inputs
        if is_row is not None:
            in_bounds = in_bounds & is_row
        found = tl.load(pointers, mask=in_bounds, other=0.0)
    return found
