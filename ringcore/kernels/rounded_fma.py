"""Up to 4 rows, rounded to FP8 in the kernel, times FP8 weights: FMA sums of whole groups, which are then scaled."""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.activation import activated
from ringcore.kernels.dependent_launch import gdc_launch_dependents, gdc_wait
from ringcore.kernels.round_rows import LARGEST
from ringcore.kernels.skinny_kernels import TRIGGER_LATE

__all__ = ["rounded_fma_kernel"]

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(1e-30)  # a divisor for groups of zeros
_LATE = tl.constexpr(TRIGGER_LATE)


@triton.jit
def _row_tile(x, gain, places, in_bounds, has_norm: tl.constexpr):
    """Rows [block_rows, 1, groups, group] as float32, and times the gain."""
    v = tl.load(x + places, mask=in_bounds, other=0.0).to(tl.float32)
    if has_norm:
        scaled = v * tl.load(gain, mask=in_bounds, other=0.0).to(tl.float32)
    else:
        scaled = v
    return v, scaled


@triton.jit
def _group_sums(codes, w, scales, row_scales):
    """[block_rows, outputs, groups]: the sum of each group of inputs, scaled."""
    return tl.sum(w.to(tl.float16).to(tl.float32) * codes, 3) * (scales * row_scales)


@triton.jit
def _weight_scales(scales, rows, at, index, row_stride, group_stride, num_groups: tl.constexpr, one: tl.constexpr):
    """[1, outputs, groups]."""
    if one:
        found = tl.load(scales + rows[:, None] * row_stride + index[None, :] * 0)
    else:
        groups = tl.minimum(at + index, num_groups - 1)
        found = tl.load(scales + rows[:, None] * row_stride + groups[None, :] * group_stride)
    return found[None, :, :]


@triton.jit(do_not_specialize=["num_outputs"])
def rounded_fma_kernel(
    x,  # [num_rows, num_inputs]
    weight,  # [num_outputs, num_inputs] e4m3, or gated
    scales,  # [num_outputs, groups] float32, or [num_outputs, 1]
    row_stride,  # of scales
    group_stride,
    gain,  # [num_inputs], read where has_norm
    bias,  # [num_outputs], or gated; read where has_bias
    out,  # [num_rows, num_outputs]
    num_outputs,  # int
    eps,  # float
    num_rows: tl.constexpr,
    block_rows: tl.constexpr,  # a power of two, num_rows or more
    num_inputs: tl.constexpr,
    group: tl.constexpr,  # inputs of a group of weights, unless has_one_scale, and of rows, unless by_row
    block_groups: tl.constexpr,  # groups whose weights are in registers: a power of two
    block_outputs: tl.constexpr,
    has_one_scale: tl.constexpr,  # an output has
    by_row: tl.constexpr,  # a row has one scale
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A program computes block_outputs outputs of all rows. A norm's factor does not change the codes of a row that is
    scaled by its largest number: it multiplies the sums. Out-of-bounds rows and outputs are clamped to the last ones;
    their results are not stored."""
    num_groups: tl.constexpr = num_inputs // group
    first = tl.program_id(0) * block_outputs
    outputs = first + tl.arange(0, block_outputs)
    clamped = tl.minimum(outputs, num_outputs - 1)
    rows = tl.minimum(tl.arange(0, block_rows), num_rows - 1)
    index = tl.arange(0, block_groups)
    inputs = (index[:, None] * group + tl.arange(0, group)[None, :])[None, None, :, :]
    of_row = (rows * num_inputs)[:, None, None, None]
    tile = weight + clamped.to(tl.int64)[None, :, None, None] * num_inputs + inputs
    up_tile = tile + num_outputs.to(tl.int64) * num_inputs
    targets = out + rows[:, None] * num_outputs + clamped[None, :]
    in_bounds = inputs < num_inputs
    up_outputs = clamped + num_outputs
    if pdl and pdl != _LATE:
        gdc_launch_dependents()
    w = tl.load(tile, mask=in_bounds, other=0.0)
    s = _weight_scales(scales, clamped, 0, index, row_stride, group_stride, num_groups, has_one_scale)
    if is_gated:
        u = tl.load(up_tile, mask=in_bounds, other=0.0)
        t = _weight_scales(scales, up_outputs, 0, index, row_stride, group_stride, num_groups, has_one_scale)
    if has_bias:
        b = tl.load(bias + clamped)
        if is_gated:
            c = tl.load(bias + up_outputs)
    if pdl == _LATE:
        gdc_launch_dependents()
    if pdl:
        gdc_wait()
    if adds:
        before = tl.load(targets)
    if by_row:
        largest = tl.zeros([block_rows, 1, block_groups], tl.float32)
        for at in tl.static_range(0, num_groups, block_groups):
            here = in_bounds & (inputs + at * group < num_inputs)
            _, scaled = _row_tile(x + at * group, gain + at * group + inputs, of_row + inputs, here, has_norm)
            largest = tl.maximum(largest, tl.max(tl.abs(scaled), 3))
        whole = tl.maximum(tl.max(largest, 2, keep_dims=True) / _LARGEST, _LEAST)
    y = tl.zeros([block_rows, block_outputs, block_groups], tl.float32)
    z = tl.zeros([block_rows, block_outputs, block_groups], tl.float32)
    squares = tl.zeros([block_rows, 1, block_groups], tl.float32)
    for at in tl.static_range(0, num_groups, block_groups):
        here = inputs + at * group < num_inputs
        if at > 0:
            w = tl.load(tile + at * group, mask=here, other=0.0)
            s = _weight_scales(scales, clamped, at, index, row_stride, group_stride, num_groups, has_one_scale)
            if is_gated:
                u = tl.load(up_tile + at * group, mask=here, other=0.0)
                t = _weight_scales(scales, up_outputs, at, index, row_stride, group_stride, num_groups, has_one_scale)
        v, scaled = _row_tile(x + at * group, gain + at * group + inputs, of_row + inputs, here, has_norm)
        if by_row:
            of_groups = tl.broadcast_to(whole, [block_rows, 1, block_groups])
        else:
            of_groups = tl.maximum(tl.max(tl.abs(scaled), 3) / _LARGEST, _LEAST)
        codes = scaled / of_groups[:, :, :, None]
        codes = tl.minimum(tl.maximum(codes, -_LARGEST), _LARGEST).to(tl.float8e4nv).to(tl.float16).to(tl.float32)
        y += _group_sums(codes, w, s, of_groups)
        if is_gated:
            z += _group_sums(codes, u, t, of_groups)
        if has_norm:
            squares += tl.sum(v * v, 3)
    result = tl.sum(y, 2)
    if is_gated:
        up = tl.sum(z, 2)
    if has_norm:
        factor = tl.rsqrt(tl.sum(squares, 2) / num_inputs + eps)
        result *= factor
        if is_gated:
            up *= factor
    if has_bias:
        result += b.to(tl.float32)[None, :]
        if is_gated:
            up += c.to(tl.float32)[None, :]
    if is_gated:
        result = activated(result, is_gelu) * up
    if adds:
        result += before.to(tl.float32)
    stored = (tl.arange(0, block_rows) < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, result.to(out.dtype.element_ty), mask=stored)
