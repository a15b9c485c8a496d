"""FP8 times FP8 on the tensor cores: the sum of a tile over its inputs, where weights and rows have scales."""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.weight_groups import scale_rows

__all__ = ["block_scaled_dot", "scaled_dot"]

_PROMOTED = tl.constexpr(128)  # inputs that the tensor cores of Hopper sum, of fewer bits, before a sum in float32


@triton.jit
def _scales(values, row_stride, group_stride, rows, at, group: tl.constexpr, num_groups: tl.constexpr):
    """Of rows, for the group of input `at`: [n]. Past the last group, of that one."""
    if num_groups == 1:
        found = tl.load(values + rows * row_stride)
    else:
        found = tl.load(values + rows * row_stride + tl.minimum(at // group, num_groups - 1) * group_stride)
    return found


@triton.jit
def scaled_dot(
    total,  # [block_weights, block_rows] float32
    tile,  # pointers [block_weights, block_inputs], e4m3
    inputs,  # pointers [block_inputs, block_rows], e4m3
    packed,  # see `weight_tiles.tile_arguments`
    row_scales,  # [num_rows, groups]
    weight_rows,
    rows,  # all in bounds
    first,
    last,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,  # divides the groups of weights and of rows
    num_stages: tl.constexpr,
    row_group: tl.constexpr,
    layout: tl.constexpr,
):
    """total + the products of inputs `first` to `last`. A group's sum is scaled as a whole, so that no number is
    expanded; the scales of the next group are loaded while this one is multiplied."""
    steps = tl.arange(0, block_inputs)
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    weight_groups: tl.constexpr = layout[1]
    weight_group: tl.constexpr = layout[2]
    row_groups: tl.constexpr = num_inputs // row_group
    promoted: tl.constexpr = _PROMOTED if block_inputs > _PROMOTED else block_inputs
    weight_rows = scale_rows(weight_rows, layout)
    of_weights = _scales(packed[0], packed[4], packed[5], weight_rows, first, weight_group, weight_groups)
    of_rows = _scales(row_scales, row_groups, 1, rows, first, row_group, row_groups)
    for at in tl.range(first, last, block_inputs, num_stages=num_stages):
        if is_whole:
            w = tl.load(tile + at)
            v = tl.load(inputs + at)
        else:
            w = tl.load(tile + at, mask=steps[None, :] < num_inputs - at, other=0.0)
            v = tl.load(inputs + at, mask=steps[:, None] < num_inputs - at, other=0.0)
        if weight_groups == 1 and row_groups == 1:
            total = tl.dot(w, v, total, max_num_imprecise_acc=promoted)
        else:
            after = at + block_inputs
            next_weights = _scales(packed[0], packed[4], packed[5], weight_rows, after, weight_group, weight_groups)
            next_rows = _scales(row_scales, row_groups, 1, rows, after, row_group, row_groups)
            products = tl.dot(w, v, max_num_imprecise_acc=promoted)
            total += products * (of_weights[:, None] * of_rows[None, :])
            of_weights, of_rows = next_weights, next_rows
    if weight_groups == 1 and row_groups == 1:
        total *= of_weights[:, None] * of_rows[None, :]
    return total


@triton.jit
def block_scaled_dot(
    tile,  # these five as `scaled_dot` takes them
    inputs,
    packed,
    row_scales,
    rows,
    half_rows,  # (first weight row of the lower half of the tile, of the upper half), each half in one block of scales
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,  # divides the groups of weights and of rows, and num_inputs
    num_stages: tl.constexpr,
    row_group: tl.constexpr,
    layout: tl.constexpr,
):
    """The products of all inputs, [block_weights, block_rows] float32, for at least 64 rows.

    On the tensor cores rows are the M side, of which a thread has few, and so few of their scales; on the N side it
    would load one for nearly every second sum. The weights there share one scale a half.
    """
    block_weights: tl.constexpr = tile.shape[0]
    row_groups: tl.constexpr = num_inputs // row_group
    promoted: tl.constexpr = _PROMOTED if block_inputs > _PROMOTED else block_inputs
    is_lower = tl.arange(0, block_weights) < block_weights // 2
    lower, upper = scale_rows(half_rows[0], layout), scale_rows(half_rows[1], layout)
    total = tl.zeros([inputs.shape[1], block_weights], tl.float32)
    of_rows = _scales(row_scales, row_groups, 1, rows, 0, row_group, row_groups)
    of_lower = _scales(packed[0], packed[4], packed[5], lower, 0, layout[2], layout[1])
    of_upper = _scales(packed[0], packed[4], packed[5], upper, 0, layout[2], layout[1])
    for at in tl.range(0, num_inputs, block_inputs, num_stages=num_stages):
        w = tl.load(tile + at)
        v = tl.load(inputs + at)
        after = at + block_inputs
        next_rows = _scales(row_scales, row_groups, 1, rows, after, row_group, row_groups)
        next_lower = _scales(packed[0], packed[4], packed[5], lower, after, layout[2], layout[1])
        next_upper = _scales(packed[0], packed[4], packed[5], upper, after, layout[2], layout[1])
        products = tl.dot(tl.trans(v), tl.trans(w), max_num_imprecise_acc=promoted)
        total += products * (of_rows[:, None] * tl.where(is_lower, of_lower, of_upper)[None, :])
        of_rows, of_lower, of_upper = next_rows, next_lower, next_upper
    return tl.trans(total)
