"""Split-KV decode attention in which each warp has tokens of its own, for Hopper and models in 16 bits.

The ranges are those of `decode_scheduler`, and what programs exchange is that of `paged_attention_decode`. What differs
is for steps whose time is a chain of waits, not the bytes that they read:

* Every warp attends to 16 tokens of a tile, with a softmax of its own: nothing crosses warps until the work item ends.
* The keys and values of the first tiles are copied to shared memory before the wait for the kernel before
  (`dependent_launch`), but for the step's own token, which that kernel writes: it is added when the item ends.
* A program that combines partials keeps its own in registers.
* QK norm, rotary embedding and the KV write may be done here: they cost a boundary between kernels less
  (`warp_split_item`).

Products are by `mma` of 16 tokens, or 16 dimensions of the values, by 8 or 16 query heads (`warp_split_products`).
Triton loads no tile before a wait and lays no softmax out by warps, so this is Gluon, which has no interpreter: it is
compared with `paged_attention_decode_reference` on a GPU alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ringcore.kernels.attention.attention_tile import MASK_VALUE, capped, sink_share
from ringcore.kernels.attention.split_kv_combine import pack_partial
from ringcore.kernels.attention.tile_ranges import SPANS_SHIFT, context_tiles, load_range
from ringcore.kernels.attention.warp_split_combine import (
    add,
    combine_partials,
    first_rows,
    merge_prefixes,
    merge_warps,
    row_layout,
)
from ringcore.kernels.attention.warp_split_item import load_item
from ringcore.kernels.attention.warp_split_prefixes import attend_prefixes
from ringcore.kernels.attention.warp_split_products import attend_codes, attend_numbers, by_head, code_factor, no_values
from ringcore.kernels.attention.warp_split_tiles import (
    WARP_TOKENS,
    allocate_ring,
    copy_stage,
    last_key,
    next_of_range,
    warp_pages,
)
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait

__all__ = ["warp_split_decode"]


@gluon.jit(do_not_specialize=["table_stride", "span_rows", "unwritten", "num_resident"])
def warp_split_decode(
    query,
    kv_cache,
    block_table,
    seq_lens,
    tile_ranges,
    out,
    partials,
    sinks,  # or None
    shared_words,  # this and the next five: None without shared prefixes
    units,
    members,
    prefixes,
    prefix_lse,
    barrier,
    cos_sin,  # this and the next: see `load_item`, or None; with cos_sin keys and values are written here
    norm_weight,
    scale_log2,
    softcap_log2,  # or None
    eps,
    query_stride,
    table_stride,
    span_rows,
    unwritten,  # int: of the last tokens of a sequence, how many this step writes: 1, or 0: it may be more
    num_resident,  # programs that run at once; others have ranges of the tail
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    rows: gl.constexpr,  # group or more: 8 or 16, the columns of a product
    combine_rows: gl.constexpr,  # group or more: rows, or half of them
    partials_per_round: gl.constexpr,
    block_size: gl.constexpr,
    head_size: gl.constexpr,
    value_offset: gl.constexpr,
    head_stride: gl.constexpr,
    page_size: gl.constexpr,
    exponent_offset: gl.constexpr,
    window: gl.constexpr,
    chunk: gl.constexpr,
    clamp: gl.constexpr,  # see `load_item`
    stages: gl.constexpr,
    num_warps: gl.constexpr,
    pdl: gl.constexpr,
):
    """One loop over the work items of the range, and in it one over their tiles, whose copies run `stages` ahead."""
    if pdl:
        gdc_launch_dependents()
    program = gl.program_id(0)
    sequence, kv_head, tile, count, seq_len, first_program, _, shared = load_range(tile_ranges, program)
    if (count == 0) & (program >= num_resident):
        return
    tile_tokens: gl.constexpr = WARP_TOKENS * num_warps
    dtype: gl.constexpr = query.dtype.element_ty
    summed: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    second_factor: gl.constexpr = gl.DotOperandLayout(1, summed, 2)
    result_layout: gl.constexpr = row_layout(rows, num_warps)
    is_fp8: gl.constexpr = exponent_offset > 0
    bits: gl.constexpr = 8 if is_fp8 else 16
    factor_dtype: gl.constexpr = gl.float16 if is_fp8 else dtype
    factor_layout: gl.constexpr = code_factor(summed, 1) if is_fp8 else second_factor
    ring = allocate_ring(kv_cache.dtype.element_ty, stages, num_warps, head_size, is_fp8)
    # Swizzled so that a product's layout is stored without bank conflicts.
    accs_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    accs = gl.allocate_shared_memory(gl.float32, [num_warps, rows, head_size], accs_layout)
    exchange = accs.slice(0, 1, 0)  # between items
    maxima_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [num_warps, rows], maxima_layout)
    sums = gl.allocate_shared_memory(gl.float32, [num_warps, rows], maxima_layout)
    # Per step, like the tables: see `paged_attention_decode`.
    num_units = program * 0 if shared_words is None else gl.load(units, cache_modifier=".cg")
    # An empty range: its sequence may be one that there is not.
    sequence, kv_head = gl.where(count > 0, sequence, 0), gl.where(count > 0, kv_head, 0)
    tile, seq_len = gl.where(count > 0, tile, 0), gl.where(count > 0, seq_len, 0)
    if shared_words is None:
        shared = seq_len * 0
    if pdl and unwritten == 0:
        gdc_wait()
    if shared_words is not None:
        scale_log2, unwritten = attend_prefixes(
            query, kv_cache, block_table, ring[0], ring[1], units, num_units, members, prefixes, prefix_lse, barrier,
            cos_sin, norm_weight, eps, span_rows, scale_log2, softcap_log2, unwritten, query_stride, table_stride,
            num_resident, num_kv_heads, group, block_size, value_offset, head_stride, page_size, pdl,
        )  # fmt: skip
    # Of the work item that is attended to; the next tile's sequence, head and place are of the tile that is copied.
    item_sequence, item_head, item_tile, item_len, item_shared = sequence, kv_head, tile, seq_len, shared
    # The work item that other programs began and that ends here; at most the first one of a range.
    _, _, num_tiles = context_tiles(seq_len, window, chunk, tile_tokens, shared)
    inherited_tiles = gl.where(tile > 0, num_tiles - tile, 0)
    combines = (inherited_tiles > 0) & (count >= inherited_tiles)
    combined_item = sequence.to(gl.int64) * num_kv_heads + kv_head
    for k in range(stages):
        if k < count:
            first, first_tile, _ = context_tiles(seq_len, window, chunk, tile_tokens, shared)
            begin, end = (first_tile + tile) * tile_tokens, seq_len - unwritten
            table = block_table + sequence.to(gl.int64) * table_stride
            offsets = warp_pages(table, begin, first, end, page_size, block_size, head_size, num_warps, bits)
            copy_stage(
                ring, k, kv_cache, kv_head, offsets, begin, first, end, value_offset, head_stride, exponent_offset,
                block_size,
            )  # fmt: skip
            sequence, kv_head, tile, seq_len, shared = next_of_range(
                sequence, kv_head, tile, seq_len, shared, seq_lens, shared_words, k + 1 < count, window, chunk,
                tile_tokens, num_kv_heads,
            )  # fmt: skip
        async_copy.commit_group()
    # Of the tile that the first iteration copies: its copies are after the wait, and may read what was written before.
    unread = 0 if cos_sin is None else 1
    first, first_tile, _ = context_tiles(seq_len, window, chunk, tile_tokens, shared)
    begin = (first_tile + tile) * tile_tokens
    table = block_table + sequence.to(gl.int64) * table_stride
    offsets = warp_pages(table, begin, first, seq_len - unread, page_size, block_size, head_size, num_warps, bits)
    own_table = block_table + item_sequence.to(gl.int64) * table_stride
    own_key = last_key(own_table, item_len, page_size, block_size, head_size) + item_head * head_stride
    if pdl:
        gdc_wait()
    row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(1, result_layout)), 1)
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, result_layout)), 0)
    in_item = row * head_size + dim
    in_bounds = (row < group) & (dim >= 0)
    queries, factor, own_keys, own_values = load_item(
        query, kv_cache, cos_sin, norm_weight, eps, item_sequence, item_head, own_key,
        gl.maximum(item_len - 1, 0) % block_size, item_len > 0, query_stride,
        exchange, num_kv_heads, group, rows, head_size, value_offset, exponent_offset, block_size, clamp,
        result_layout, factor_layout,
    )  # fmt: skip
    of_warp = gl.expand_dims(gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, summed))), 1) * WARP_TOKENS
    of_warp += gl.expand_dims(gl.arange(0, WARP_TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, summed))), 0)
    partial = gl.zeros([rows, head_size], gl.float32, result_layout)
    partial_lse = gl.zeros([rows, head_size], gl.float32, result_layout)
    slot, i = 0, 0
    while i < count:
        item_first, first_tile, num_tiles = context_tiles(item_len, window, chunk, tile_tokens, item_shared)
        is_item_end = count - i >= num_tiles - item_tile
        next_i = i + gl.minimum(num_tiles - item_tile, count - i)
        has_own = (unwritten > 0) & (item_len > 0) & is_item_end
        if cos_sin is None:
            has_own &= next_i <= stages  # copied without its last token
        item_end = item_len - has_own.to(gl.int32)
        token = of_warp + (first_tile + item_tile) * tile_tokens
        warp_max = gl.full([num_warps, rows], MASK_VALUE, gl.float32, gl.SliceLayout(1, summed))
        warp_sum = gl.zeros([num_warps, WARP_TOKENS, rows], gl.float32, summed)
        acc = no_values(num_warps, head_size, rows, is_fp8, summed)
        shape: gl.constexpr = [num_warps, head_size, rows]
        factors, _broadcast = gl.broadcast(factor.to(factor_dtype), gl.zeros(shape, factor_dtype, factor_layout))
        for j in range(i, next_i):
            async_copy.wait_group(stages - 1)
            visible = token < item_end
            if window + chunk > 0:
                visible &= token >= item_first
            if is_fp8:
                warp_max, warp_sum, acc = attend_codes(
                    ring[0].index(slot), ring[1].index(slot), ring[2].index(slot), ring[3].index(slot), factors,
                    visible, warp_max, warp_sum, acc, scale_log2, softcap_log2,
                )  # fmt: skip
            else:
                warp_max, warp_sum, acc = attend_numbers(
                    ring[0].index(slot), ring[1].index(slot), factors, visible, warp_max, warp_sum, acc, scale_log2,
                    softcap_log2,
                )  # fmt: skip
            token += tile_tokens
            if j + stages < count:
                end = seq_len - unread
                copy_stage(
                    ring, slot, kv_cache, kv_head, offsets, begin, first, end, value_offset, head_stride,
                    exponent_offset, block_size,
                )  # fmt: skip
                sequence, kv_head, tile, seq_len, shared = next_of_range(
                    sequence, kv_head, tile, seq_len, shared, seq_lens, shared_words, j + stages + 1 < count, window,
                    chunk, tile_tokens, num_kv_heads,
                )  # fmt: skip
                first, next_tile, _ = context_tiles(seq_len, window, chunk, tile_tokens, shared)
                begin = (next_tile + tile) * tile_tokens
                table = block_table + sequence.to(gl.int64) * table_stride
                end = seq_len - unread
                offsets = warp_pages(table, begin, first, end, page_size, block_size, head_size, num_warps, bits)
            async_copy.commit_group()
            slot = gl.where(slot == stages - 1, 0, slot + 1)

        accs.store(by_head(acc))
        maxima.store(warp_max)
        sums.store(gl.reduce(warp_sum, 1, add))
        score = gl.reduce(queries.to(gl.float32) * own_keys.to(gl.float32), 1, add)
        score = score * scale_log2 if softcap_log2 is None else capped(score, scale_log2, softcap_log2)
        score = gl.where(has_own, score, MASK_VALUE)
        value = gl.where(has_own, own_values.to(gl.float32), 0.0)  # else it may be NaN: of an empty sequence
        if cos_sin is not None:
            gl.store(kv_cache + own_key + dim, own_keys, mask=has_own & (dim >= 0))
            gl.store(kv_cache + own_key + value_offset + dim, own_values, mask=has_own & (dim >= 0))
        result, row_max, row_sum = merge_warps(accs, maxima, sums, score, value, num_warps, rows)
        is_shared = i < inherited_tiles
        item = item_sequence.to(gl.int64) * num_kv_heads + item_head
        if shared_words is not None:  # where the range has the item's first tile
            result, row_max, row_sum = merge_prefixes(
                result, row_max, row_sum, prefixes, prefix_lse, gl.where(is_shared, 0, item_shared >> SPANS_SHIFT),
                item * group, span_rows, group,
            )  # fmt: skip
        result = gl.where(item_len > 0, result / gl.expand_dims(row_sum, 1), 0.0)
        lse = gl.where(dim >= 0, gl.expand_dims(row_max + gl.log2(row_sum), 1), 0.0)
        if is_item_end & (not is_shared):
            written = result
            if sinks is not None:
                written *= sink_share(sinks + item_head * group + row, row < group, lse)
            gl.store(out + item * (group * head_size) + in_item, written.to(dtype), mask=in_bounds)
        elif not is_item_end:
            place = 2 * program + 1 - is_shared.to(gl.int32)
            gl.store(partials + place * (group * head_size) + in_item, pack_partial(result, lse), mask=in_bounds)
        partial, partial_lse = gl.where(i == 0, result, partial), gl.where(i == 0, lse, partial_lse)
        item_head, item_tile = item_head + 1, 0
        item_sequence += item_head // num_kv_heads
        item_head %= num_kv_heads
        if next_i < count:
            item_len = gl.load(seq_lens + item_sequence)
            if shared_words is not None:
                item_shared = gl.load(shared_words + item_sequence)
            own_table = block_table + item_sequence.to(gl.int64) * table_stride
            own_key = last_key(own_table, item_len, page_size, block_size, head_size) + item_head * head_stride
            has_own = unwritten > 0
            if cos_sin is None:
                has_own &= next_i < stages
            queries, factor, own_keys, own_values = load_item(
                query, kv_cache, cos_sin, norm_weight, eps, item_sequence, item_head, own_key,
                gl.maximum(item_len - 1, 0) % block_size, has_own, query_stride,
                exchange, num_kv_heads, group, rows, head_size, value_offset, exponent_offset, block_size, clamp,
                result_layout, factor_layout,
            )  # fmt: skip
        i = next_i
    if combines:
        own = first_rows(partial, combine_rows, num_warps)
        own_lse = first_rows(partial_lse, combine_rows, num_warps)
        item_sinks = None if sinks is None else sinks + combined_item % num_kv_heads * group
        combined = combine_partials(
            partials, first_program, program - first_program, own, own_lse, item_sinks, group,
            partials_per_round,
        )  # fmt: skip
        layout: gl.constexpr = combined.type.layout
        combined_row = gl.expand_dims(gl.arange(0, combine_rows, gl.SliceLayout(1, layout)), 1)
        combined_dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, layout)), 0)
        target = out + combined_item * (group * head_size) + combined_row * head_size + combined_dim
        gl.store(target, combined.to(dtype), mask=(combined_row < group) & (combined_dim >= 0))
