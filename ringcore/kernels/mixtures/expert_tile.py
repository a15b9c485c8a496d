"""A tile of a grouped product: some outputs of one expert for some of its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.activation import gated
from ringcore.kernels.launch.prefetch import prefetch_l2
from ringcore.kernels.linears.packed_weight import DENSE
from ringcore.kernels.linears.scaled_dot import block_scaled_dot, scaled_dot
from ringcore.kernels.linears.tile_load import load_tile
from ringcore.kernels.linears.weight_tiles import packed_dot

__all__ = ["multiply_tile", "prefetch_weights"]

_DENSE = tl.constexpr(DENSE)
_PREFETCHED_BYTES = tl.constexpr(512)  # of each row of a tile: those of all programs at once fit in the L2 cache
_MIN_M_ROWS = tl.constexpr(64)  # of the M side of the tensor cores


@triton.jit
def _gated(
    total,  # [block_weights, block_rows] float32
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
    is_gelu: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    is_interleaved: tl.constexpr,
):
    """As `ExpertGate`: [block_outputs, block_rows]."""
    if is_interleaved:
        halves = tl.permute(tl.reshape(total, [block_outputs, 2, block_rows]), (0, 2, 1))
    else:
        halves = tl.permute(tl.reshape(total, [2, block_outputs, block_rows]), (1, 2, 0))
    gate, up = tl.split(halves)
    return gated(gate, up, is_gelu, alpha, limit, offset)


@triton.jit
def prefetch_weights(
    weight,
    expert,
    layout: tl.constexpr,
    row_group: tl.constexpr,
    num_weights: tl.constexpr,
    num_inputs: tl.constexpr,
    block_weights: tl.constexpr,
    is_transposed: tl.constexpr,
):
    """Prefetches the first inputs of the rows of outputs tile `tl.program_id(0)` to L2, where a row is contiguous."""
    row_bytes: tl.constexpr = num_inputs * weight.dtype.element_ty.primitive_bitwidth // 8
    num_bytes: tl.constexpr = row_bytes if row_bytes < _PREFETCHED_BYTES else _PREFETCHED_BYTES
    has_rows: tl.constexpr = (layout[0] == _DENSE or row_group > 0) and not is_transposed
    if has_rows and row_bytes % 16 == 0:
        rows = tl.program_id(0) * block_weights + tl.arange(0, block_weights)
        places = (expert.to(tl.int64) * num_weights + rows) * num_inputs
        prefetch_l2(weight + places, rows < num_weights, num_bytes)


@triton.jit
def multiply_tile(
    x,  # these as `grouped_kernel` takes them
    row_scales,
    bias,
    rows,
    weight,
    packed,
    expert,  # of the tile
    num_left,  # pairs of the expert from the tile's first on, 1 or more
    pairs,  # [block_rows], of the tile; behind the last any
    layout: tl.constexpr,
    row_group: tl.constexpr,
    k: tl.constexpr,
    num_weights: tl.constexpr,
    num_inputs: tl.constexpr,
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    block_weights: tl.constexpr,
    num_stages: tl.constexpr,
    is_whole: tl.constexpr,
    reads_pairs: tl.constexpr,
    is_transposed: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    is_interleaved: tl.constexpr,
):
    """Stores outputs tile `tl.program_id(0)` of block_rows rows of an expert."""
    span: tl.constexpr = 64  # rows of a weight
    block_outputs: tl.constexpr = block_weights // 2 if is_gated else block_weights
    num_outputs: tl.constexpr = num_weights // 2 if is_gated else num_weights
    first_output = tl.program_id(0) * block_outputs
    row = tl.arange(0, block_rows)
    at_weight = tl.arange(0, block_weights)
    are_halves: tl.constexpr = is_gated and not is_interleaved
    if are_halves:
        outputs = tl.minimum(first_output + at_weight % block_outputs, num_outputs - 1)
        weight_rows = outputs + at_weight // block_outputs * num_outputs
    elif num_weights % block_weights == 0:  # known to be consecutive, rows may be loaded as vectors
        weight_rows = tl.program_id(0) * block_weights + at_weight
    elif num_weights % span == 0 and block_weights % span == 0:  # likewise
        spans = tl.program_id(0) * (block_weights // span) + at_weight // span
        weight_rows = tl.minimum(spans, num_weights // span - 1) * span + at_weight % span
    else:
        weight_rows = tl.minimum(tl.program_id(0) * block_weights + at_weight, num_weights - 1)
    steps = tl.arange(0, block_inputs)
    matrix = weight + expert.to(tl.int64) * (num_weights * num_inputs)
    packed_rows = expert * num_weights + weight_rows
    if is_transposed:
        tile = matrix + steps[None, :] * num_weights + weight_rows[:, None]
    else:
        tile = matrix + weight_rows[:, None] * num_inputs + steps[None, :]
    step: tl.constexpr = num_weights if is_transposed else 1
    x_rows = pairs if reads_pairs else pairs // k
    inputs = x + x_rows.to(tl.int64)[None, :] * num_inputs + steps[:, None]
    total = tl.zeros([block_weights, block_rows], tl.float32)
    if row_group > 0:
        half: tl.constexpr = block_weights // 2
        are_blocks: tl.constexpr = is_whole and num_weights % block_weights == 0 and layout[9] % half == 0
        if are_blocks and block_rows >= _MIN_M_ROWS:
            first_row = expert * num_weights + (first_output if are_halves else tl.program_id(0) * block_weights)
            half_rows = first_row, first_row + (num_outputs if are_halves else half)
            total = block_scaled_dot(
                *(tile, inputs, packed, row_scales, x_rows, half_rows),
                num_inputs, block_inputs, num_stages, row_group, layout,
            )  # fmt: skip
        else:
            total = scaled_dot(
                *(total, tile, inputs, packed, row_scales, packed_rows, x_rows, 0, num_inputs),
                num_inputs, block_inputs, num_stages, row_group, layout,
            )  # fmt: skip
    elif layout[0] == _DENSE:
        for at in tl.range(0, num_inputs, block_inputs, num_stages=num_stages):
            w = load_tile(tile + at * step, steps[None, :] < num_inputs - at, is_whole)
            v = load_tile(inputs + at, steps[:, None] < num_inputs - at, is_whole)
            total = tl.dot(w, v, total, input_precision="ieee")
    else:
        first_inputs = x + x_rows.to(tl.int64)[None, :] * num_inputs
        is_row = (row < num_left)[None, :]  # what is not loaded takes no bandwidth of the L2 cache
        total = packed_dot(
            *(total, first_inputs, weight, packed, packed_rows, 0, num_inputs),
            num_inputs, block_inputs, num_stages, is_whole, layout, is_row,
        )  # fmt: skip
    if has_bias:
        total += tl.load(bias + expert * num_weights + weight_rows).to(tl.float32)[:, None]
    if is_gated:
        total = _gated(total, block_outputs, block_rows, is_gelu, alpha, limit, offset, is_interleaved)
    outputs = first_output + tl.arange(0, block_outputs)
    in_bounds = (outputs < num_outputs)[:, None] & (row < num_left)[None, :]
    targets = rows + pairs.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(targets, total.to(rows.dtype.element_ty), mask=in_bounds)
