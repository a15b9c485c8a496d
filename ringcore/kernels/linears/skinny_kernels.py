"""Two kernels of `skinny_linear`: FMA sums of dense weights for up to 4 rows, tensor cores for more.

Both read a weight once, as rows of [num_outputs, num_inputs], which tensor cores take expanded where it is quantized
(`weight_tiles`), and both may prefetch weights before they wait for the kernel before them (`dependent_launch`). A
gated weight is [2 * num_outputs, num_inputs]: the rows of the gate projection, then those of the up projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.activation import activated
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait
from ringcore.kernels.launch.prefetch import prefetch_l2
from ringcore.kernels.linears.packed_weight import DENSE
from ringcore.kernels.linears.scaled_dot import scaled_dot
from ringcore.kernels.linears.tile_load import load_tile, load_weights
from ringcore.kernels.linears.weight_groups import entries_of_row, has_quads, scale_rows
from ringcore.kernels.linears.weight_tiles import packed_dot
from ringcore.kernels.reductions import add2, add3

__all__ = ["TRIGGER_FIRST", "TRIGGER_LATE", "dot_kernel", "fma_kernel"]

# The values of `pdl` besides 0 (off): the next kernel may start before or after this one has issued its weight loads.
TRIGGER_FIRST = 1
TRIGGER_LATE = 2

_LATE = tl.constexpr(TRIGGER_LATE)
_DENSE = tl.constexpr(DENSE)


@triton.jit(do_not_specialize=["num_outputs"])
def fma_kernel(
    x,  # [num_rows, num_inputs]
    weight,  # [num_outputs, num_inputs], or gated
    gain,  # [num_inputs], read where has_norm
    bias,  # [num_outputs], or gated; read where has_bias
    out,  # [num_rows, num_outputs]
    num_outputs,  # int
    eps,  # float
    num_rows: tl.constexpr,
    block_rows: tl.constexpr,  # a power of two, num_rows or more
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    is_whole: tl.constexpr,  # block_inputs divides num_inputs
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A program holds the weights of block_outputs outputs in registers, for all rows. Out-of-bounds rows and outputs
    are clamped to the last ones; their results are not stored.

    After the wait all loads are issued at once, nothing loaded before the wait is used before it, and all sums over the
    inputs are one reduction: each of these saves a trip to the L2 cache or a round of barriers.
    """
    first = tl.program_id(0) * block_outputs
    outputs = first + tl.arange(0, block_outputs)
    rows = tl.minimum(tl.arange(0, block_rows), num_rows - 1)
    columns = tl.arange(0, block_inputs)[None, None, :]
    clamped = tl.minimum(tl.arange(0, block_outputs), num_outputs - 1 - first)
    # Offsets within a program fit in 32 bits, those within an LM head do not.
    tile = weight + first.to(tl.int64) * num_inputs + (clamped[:, None] * num_inputs)[None, :, :] + columns
    up_tile = tile + num_outputs.to(tl.int64) * num_inputs
    x += (rows * num_inputs)[:, None, None] + columns
    gain += columns
    targets = out + rows[:, None] * num_outputs + (first + clamped)[None, :]
    if pdl and pdl != _LATE:
        gdc_launch_dependents()
    w = load_weights(tile, columns < num_inputs, is_whole)
    if is_gated:
        u = load_weights(up_tile, columns < num_inputs, is_whole)
    if has_norm:
        g = load_tile(gain, columns < num_inputs, is_whole)
    if has_bias:
        b = tl.load(bias + first + clamped)
        if is_gated:
            c = tl.load(bias + num_outputs + first + clamped)
    if pdl == _LATE:
        gdc_launch_dependents()
    if pdl:
        gdc_wait()
    v = load_tile(x, columns < num_inputs, is_whole).to(tl.float32)
    if adds:
        before = tl.load(targets)
    if has_norm:
        squares = v * v
        v = v * g.to(tl.float32)
    y = w.to(tl.float32) * v  # [block_rows, block_outputs, block_inputs]
    if is_gated:
        z = u.to(tl.float32) * v
    for at in tl.static_range(block_inputs, num_inputs, block_inputs):
        in_bounds = columns < num_inputs - at
        w = load_weights(tile + at, in_bounds, is_whole)
        v = load_tile(x + at, in_bounds, is_whole).to(tl.float32)
        if has_norm:
            squares += v * v
            v = v * load_tile(gain + at, in_bounds, is_whole).to(tl.float32)
        y += w.to(tl.float32) * v
        if is_gated:
            u = load_weights(up_tile + at, in_bounds, is_whole)
            z += u.to(tl.float32) * v
    if has_norm:
        squares = tl.broadcast_to(squares, [block_rows, block_outputs, block_inputs])
        if is_gated:
            y, z, total = tl.reduce((y, z, squares), 2, add3)
            scale = tl.rsqrt(total / num_inputs + eps)
            y, z = y * scale, z * scale
        else:
            y, total = tl.reduce((y, squares), 2, add2)
            y = y * tl.rsqrt(total / num_inputs + eps)
    elif is_gated:
        y, z = tl.reduce((y, z), 2, add2)
    else:
        y = tl.sum(y, 2)
    if has_bias:
        y += b.to(tl.float32)[None, :]
        if is_gated:
            z += c.to(tl.float32)[None, :]
    if is_gated:
        y = activated(y, is_gelu) * z
    if adds:
        y += before.to(tl.float32)
    in_bounds = (tl.arange(0, block_rows) < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, y.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit
def _epilogue(
    total,  # [block_weights, block_rows] float32
    weight_rows,
    bias,
    out,
    rows,
    num_rows,
    num_outputs,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Bias, gate, residual add, cast, store."""
    if has_bias:
        total += tl.load(bias + weight_rows).to(tl.float32)[:, None]
    if is_gated:
        halves = tl.permute(tl.reshape(total, [2, block_outputs, block_rows]), (1, 2, 0))
        gate, up = tl.split(halves)
        total = activated(gate, is_gelu) * up
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    in_bounds = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    targets = out + rows[None, :] * num_outputs + outputs[:, None]
    if adds:
        total += tl.load(targets, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(targets, total.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def dot_kernel(
    x,  # [num_rows, num_inputs]; or its codes
    row_scales,  # [num_rows, groups], read where x is rounded
    weight,  # [num_outputs, num_inputs], or gated; or its codes
    packed,  # see `tile_arguments`
    bias,  # [num_outputs], or gated; read where has_bias
    out,  # [num_rows, num_outputs]
    partials,  # [splits, tiles, block_weights, block_rows] float32, of any content
    counters,  # [tiles] int32, all 0, and 0 again afterwards
    num_rows,  # int
    num_outputs,  # int
    block_rows: tl.constexpr,  # rows of x per program: 16 or a higher power of two
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_weights: tl.constexpr,  # rows of the weight per program: the M side of the product, where wgmma takes 64
    splits: tl.constexpr,
    segments: tl.constexpr,  # of the inputs, in one program; 1 where there are splits
    num_stages: tl.constexpr,
    is_whole: tl.constexpr,  # block_inputs divides num_inputs
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    adds: tl.constexpr,
    prefetched_inputs: tl.constexpr,  # inputs of each weight row that are prefetched to L2 before the wait
    scale_bytes: tl.constexpr,  # likewise, of the row of scales that the outputs of a tile share; 0: they do not
    threads: tl.constexpr,  # block_outputs or more
    pdl: tl.constexpr,
    row_group: tl.constexpr,  # inputs that share a scale of x; 0: x is not rounded
    layout: tl.constexpr,  # of the weight: see `tile_arguments`
) -> None:
    """Program (i, j, k) sums split k of the inputs (split-K) for row block i and outputs tile j: the row blocks of a
    tile run together, so that its weights are read from memory once. With several splits the program that arrives last
    at the tile's counter reduces all partials, always in the same order. Segments are reduced so by one program: a sum
    of as many splits has the same bits."""
    block_outputs: tl.constexpr = block_weights // 2 if is_gated else block_weights
    index = tl.arange(0, block_weights)
    outputs = tl.minimum(tl.program_id(1) * block_outputs + index % block_outputs, num_outputs - 1)
    weight_rows = outputs + index // block_outputs * num_outputs
    row = tl.arange(0, block_rows)
    rows = tl.program_id(0) * block_rows + row
    steps = tl.arange(0, block_inputs)
    blocks: tl.constexpr = (num_inputs + block_inputs - 1) // block_inputs
    spans: tl.constexpr = splits * segments
    span_inputs: tl.constexpr = (blocks + spans - 1) // spans * block_inputs
    first = tl.program_id(2) * span_inputs
    last = tl.minimum(first + segments * span_inputs, num_inputs)
    tile = weight + weight_rows.to(tl.int64)[:, None] * num_inputs + steps[None, :]
    # Out-of-bounds rows wrap around to the first ones: a mask would cost 1% of a pass where the block is full, and if
    # all of them read one row, programs would contend for it.
    inputs = x + (rows % num_rows)[None, :] * num_inputs + steps[:, None]
    if pdl:
        gdc_launch_dependents()
        if prefetched_inputs > 0:
            number_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            each: tl.constexpr = 4 if has_quads(layout) else 1  # inputs of an entry
            row_stride = entries_of_row(packed, num_inputs, layout)
            # One thread prefetches one output's weights.
            prefetched_rows = tl.program_id(1) * block_outputs + tl.arange(0, threads)
            in_bounds = (tl.arange(0, threads) < block_outputs) & (prefetched_rows < num_outputs) & (first < last)
            prefetched = weight + prefetched_rows.to(tl.int64) * row_stride + first // each
            prefetched_bytes = tl.minimum(last - first, prefetched_inputs) // each * number_bytes
            prefetch_l2(prefetched, in_bounds, prefetched_bytes)
            if is_gated:
                prefetch_l2(prefetched + num_outputs.to(tl.int64) * row_stride, in_bounds, prefetched_bytes)
        if scale_bytes > 0:
            half = tl.arange(0, threads)  # of a gated tile
            of_half = scale_rows(tl.program_id(1) * block_outputs + half * num_outputs, layout)
            prefetch_l2(packed[0] + of_half * packed[4], half < (2 if is_gated else 1), scale_bytes)
        gdc_wait()
    total = tl.zeros([block_weights, block_rows], tl.float32)
    for segment in tl.static_range(segments):
        begin = first + segment * span_inputs
        end = tl.minimum(begin + span_inputs, last)
        part = tl.zeros([block_weights, block_rows], tl.float32)
        if row_group > 0:
            tiles = part, tile, inputs, packed, row_scales, weight_rows, rows % num_rows, begin, end
            part = scaled_dot(*tiles, num_inputs, block_inputs, num_stages, row_group, layout)
        elif layout[0] == _DENSE:
            for at in tl.range(begin, end, block_inputs, num_stages=num_stages):
                w = load_tile(tile + at, steps[None, :] < num_inputs - at, is_whole)
                v = load_tile(inputs + at, steps[:, None] < num_inputs - at, is_whole)
                part = tl.dot(w, v, part, input_precision="ieee")
        else:
            of_codes = part, x + (rows % num_rows)[None, :] * num_inputs, weight, packed, weight_rows, begin, end
            part = packed_dot(*of_codes, num_inputs, block_inputs, num_stages, is_whole, layout)
        total = part if segment == 0 else total + part
    if splits == 1:
        _epilogue(
            *(total, weight_rows, bias, out, rows, num_rows, num_outputs),
            block_outputs, block_rows, has_bias, is_gated, is_gelu, adds,
        )  # fmt: skip
    else:
        tile_index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        offsets = tile_index * (block_weights * block_rows) + index[:, None] * block_rows + row[None, :]
        partial_size = tl.num_programs(0) * tl.num_programs(1) * (block_weights * block_rows)
        tl.store(partials + tl.program_id(2) * partial_size + offsets, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile_index, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            total = tl.load(partials + offsets, cache_modifier=".cg")
            for i in tl.static_range(1, splits):
                total += tl.load(partials + i * partial_size + offsets, cache_modifier=".cg")
            _epilogue(
                *(total, weight_rows, bias, out, rows, num_rows, num_outputs),
                block_outputs, block_rows, has_bias, is_gated, is_gelu, adds,
            )  # fmt: skip
            tl.store(counters + tile_index, 0)
