"""The kernels of a mixture of experts: a grouped product, and the weighted sum over the experts of a token.

A product has one work item per expert and tile of its rows, as many as there are pairs of a token and an expert demand:
a program finds its own on the device, of few tokens in a list, of more from the offsets of the sorted pairs. So there
is no padding but in the last tile of each expert that has rows, and the grid, which the host launches without knowing
the routing, has at most one program per expert more than there is work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait
from ringcore.kernels.mixtures.expert_tile import multiply_tile, prefetch_weights

__all__ = ["grouped_kernel", "weighted_sum_kernel"]


@triton.jit
def _weighted(
    rows,  # [num_tokens * k, size]
    experts,  # [num_tokens, k]
    weights,  # [num_tokens, k]
    token,
    columns,  # [block]
    first,
    k: tl.constexpr,
    block_k: tl.constexpr,
    num_experts: tl.constexpr,
    size: tl.constexpr,
    is_shared: tl.constexpr,
):
    """The sum over the experts of a token that this rank has, always in the same order: [block] float32. is_shared:
    other programs of this launch wrote the rows."""
    pairs = token * k + tl.arange(0, block_k)
    expert = tl.load(experts + pairs, mask=tl.arange(0, block_k) < k, other=-1).to(tl.int32) - first
    is_here = (tl.arange(0, block_k) < k) & (expert >= 0) & (expert < num_experts)
    weight = tl.load(weights + pairs, mask=is_here, other=0.0).to(tl.float32)
    pointers = rows + pairs.to(tl.int64)[:, None] * size + columns[None, :]
    in_bounds = is_here[:, None] & (columns < size)[None, :]
    if is_shared:
        found = tl.load(pointers, mask=in_bounds, other=0.0, cache_modifier=".cg")
    else:
        found = tl.load(pointers, mask=in_bounds, other=0.0)
    return tl.sum(found.to(tl.float32) * weight[:, None], 0)


@triton.jit
def _store_sum(total, out, token, columns, size: tl.constexpr, adds: tl.constexpr):
    targets = out + token * size + columns
    if adds:
        total += tl.load(targets, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(targets, total.to(out.dtype.element_ty), mask=columns < size)


@triton.jit
def _item_of_offsets(offsets, item, num_experts: tl.constexpr, block_experts: tl.constexpr, block_rows: tl.constexpr):
    """Of a work item: its expert, the place of its first pair, and how many pairs the expert has from it on; 0 or less
    behind the last item."""
    index = tl.arange(0, block_experts)
    begins = tl.load(offsets + index, mask=index < num_experts, other=0, cache_modifier=".cg")
    ends = tl.load(offsets + index + 1, mask=index < num_experts, other=0, cache_modifier=".cg")
    tiles = (ends - begins + block_rows - 1) // block_rows
    num_before = tl.cumsum(tiles, 0)  # with its own
    expert = tl.sum((num_before <= item).to(tl.int32))
    end = tl.sum(tl.where(index == expert, ends, 0))
    begin = tl.sum(tl.where(index == expert, begins - (num_before - tiles) * block_rows, 0)) + item * block_rows
    return expert, begin, tl.where(item < tl.sum(tiles), end - begin, 0)


@triton.jit
def _sorted_pairs(order, begin, num_left, block_rows: tl.constexpr):
    """Of a tile; rows behind the last wrap around to the first ones."""
    return tl.load(order + begin + tl.arange(0, block_rows) % tl.minimum(num_left, block_rows))


@triton.jit(do_not_specialize=["num_tokens", "first"])
def grouped_kernel(
    x,  # [num_tokens, num_inputs], or [num_tokens * k, num_inputs] where reads_pairs; or codes of rounded rows
    row_scales,  # of each row of x, for each row_group of inputs, read where that is not 0
    bias,  # [num_experts, num_weights], read where has_bias
    order,  # [num_tokens * k] int32, see `SortedPairs`; [items, block_rows] where has_items, see `WorkItems`
    offsets,  # [num_experts + 1] int32; or [items, 2]
    rows,  # [num_tokens * k, num_outputs]
    experts,  # [num_tokens, k], read where by_pair or sums
    weights,  # [num_tokens, k]; these three are read where sums
    out,  # [num_tokens, num_outputs]
    counters,  # [output tiles] int32, all 0, and 0 again afterwards
    num_tokens,  # int
    first,  # int, the layer's index of the first expert
    weight,  # [num_experts, num_weights, num_inputs], or of inputs and weights where is_transposed; or codes
    packed,  # these two: see `weight_tiles.tile_arguments`
    layout: tl.constexpr,
    row_group: tl.constexpr,  # inputs that share a scale of a row; 0: rows are not rounded
    k: tl.constexpr,
    block_k: tl.constexpr,
    num_experts: tl.constexpr,
    block_experts: tl.constexpr,
    num_weights: tl.constexpr,
    num_inputs: tl.constexpr,
    block_rows: tl.constexpr,
    tail_rows: tl.constexpr,  # of the tile of an expert's last rows, where they fit; 0: as of the others
    block_inputs: tl.constexpr,
    block_weights: tl.constexpr,  # the M side of the product, where wgmma takes 64
    num_stages: tl.constexpr,
    is_whole: tl.constexpr,  # block_inputs divides num_inputs
    by_pair: tl.constexpr,  # a work item is a pair
    has_items: tl.constexpr,  # a work item is one of a list
    reads_pairs: tl.constexpr,
    finds_early: tl.constexpr,  # the second product, whose items were listed before the first one
    is_transposed: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    is_interleaved: tl.constexpr,
    sums: tl.constexpr,  # where by_pair
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) computes outputs tile i of work item j, block_rows rows of one expert at most; item by item the
    experts with rows in their order, so neighbours share weights or rows in the L2 cache.

    The second product may find its items, and prefetch weights of them, while the first one ends.

    Where `sums`, the program that arrives last at the counter of its outputs tile sums the rows of each token.
    """
    block_outputs: tl.constexpr = block_weights // 2 if is_gated else block_weights
    num_outputs: tl.constexpr = num_weights // 2 if is_gated else num_weights
    if pdl:
        if not reads_pairs:
            gdc_wait()  # first: so what was written before is complete when the programs of the second product start
        gdc_launch_dependents()
        if reads_pairs and not finds_early:
            gdc_wait()
    item = tl.program_id(1)
    if by_pair:
        expert = tl.load(experts + item, cache_modifier=".cg").to(tl.int32) - first
        num_left = ((expert >= 0) & (expert < num_experts)).to(tl.int32)
        pairs = item + tl.zeros([block_rows], tl.int32)
    elif has_items:
        expert = tl.load(offsets + 2 * item, cache_modifier=".cg")
        num_left = tl.load(offsets + 2 * item + 1, cache_modifier=".cg")
        pairs = tl.load(order + item * block_rows + tl.arange(0, block_rows), cache_modifier=".cg")
    else:
        expert, begin, num_left = _item_of_offsets(offsets, item, num_experts, block_experts, block_rows)
    if pdl and finds_early:
        if num_left > 0:
            prefetch_weights(weight, expert, layout, row_group, num_weights, num_inputs, block_weights, is_transposed)
        gdc_wait()
    if num_left > 0:
        of_tile = x, row_scales, bias, rows, weight, packed, expert, num_left
        is_sorted: tl.constexpr = not by_pair and not has_items
        if is_sorted and tail_rows > 0 and num_left <= tail_rows:
            multiply_tile(
                *of_tile, _sorted_pairs(order, begin, num_left, tail_rows),
                layout, row_group, k, num_weights, num_inputs, tail_rows, block_inputs, block_weights, num_stages,
                is_whole, reads_pairs, is_transposed, has_bias,
                is_gated, is_gelu, alpha, limit, offset, is_interleaved,
            )  # fmt: skip
        else:
            if is_sorted:
                pairs = _sorted_pairs(order, begin, num_left, block_rows)
            multiply_tile(
                *of_tile, pairs,
                layout, row_group, k, num_weights, num_inputs, block_rows, block_inputs, block_weights, num_stages,
                is_whole, reads_pairs, is_transposed, has_bias,
                is_gated, is_gelu, alpha, limit, offset, is_interleaved,
            )  # fmt: skip
    if sums:
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(1) - 1:
            columns = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
            for token in range(num_tokens):
                summed = _weighted(
                    rows, experts, weights, token, columns, first, k, block_k, num_experts, num_outputs, True
                )
                _store_sum(summed, out, token, columns, num_outputs, adds)
            tl.store(counters + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["first"])
def weighted_sum_kernel(
    rows,  # [num_tokens * k, size]
    experts,  # [num_tokens, k]
    weights,  # [num_tokens, k]
    out,  # [num_tokens, size]
    first,  # int
    k: tl.constexpr,
    block_k: tl.constexpr,
    num_experts: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = _weighted(rows, experts, weights, token, columns, first, k, block_k, num_experts, size, False)
    _store_sum(total, out, token, columns, size, adds)
