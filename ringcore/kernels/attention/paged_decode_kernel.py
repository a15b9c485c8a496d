"""The Triton kernel of `paged_attention_decode`, for all caches: all warps of a program share a tile.

With spans (`attention_spans`) a result has the same bits whatever the ranges are: see `span_scheduler`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.attention.attention_spans import SUMS, merge_partials, span_end, span_index, span_partial
from ringcore.kernels.attention.attention_tile import MASK_VALUE, attend_tile, sink_share, tile_blocks
from ringcore.kernels.attention.cascade_attention import PREFIXES, attend_shared_prefixes, merge_prefix
from ringcore.kernels.attention.decode_tiles import next_tile, prefetch_first_tile
from ringcore.kernels.attention.fp8_kv import dims_of_columns
from ringcore.kernels.attention.split_kv_combine import combine_partials, pack_partial
from ringcore.kernels.attention.tile_ranges import SPANS_SHIFT, TILES_MASK, context_tiles, load_range
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait

__all__ = ["paged_decode_kernel"]


@triton.jit(do_not_specialize=["table_stride", "span_rows"])
def paged_decode_kernel(
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
    scale_log2,
    softcap_log2,  # or None
    query_stride,
    table_stride,
    span_rows,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,  # group, rounded up to a tl.dot tile
    combine_rows: tl.constexpr,
    partials_per_round: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    exponent_offset: tl.constexpr,
    width: tl.constexpr,
    v_width: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    contiguous_tokens: tl.constexpr,  # gcd of block and tile: tokens that are contiguous in every block
    threads: tl.constexpr,
    span_slots: tl.constexpr,  # of a program, for partials of spans; 0: no spans
    local_shift: tl.constexpr,  # of spans
    passes: tl.constexpr,  # see `PrefixTensors.passes`
    pdl: tl.constexpr,
):
    """One loop over all tiles of the range, across work items: the keys of an item's first tiles are in flight while
    the item before it ends.

    Iteration i attends to tile i, loads the block ids of tile i + 1 and the length of tile i + 2's sequence: no address
    depends on a load of the same iteration. Every loop-carried value is computed in the iteration before; a value that
    is only passed on keeps the compiler from pipelining the loop at all.
    """
    if pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # The schedule and the tables are per step, not per layer: they were written before the first kernel after
    # `DecodeTileScheduler.plan` could start, so they may be read before the wait.
    sequence, kv_head, tile, count, seq_len, first_program, first_span, shared = load_range(tile_ranges, program)
    if shared_words is None:
        shared = seq_len * 0
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)[None, :]
    in_bounds = (row < group)[:, None] & (dim < head_size)
    in_item = row[:, None] * head_size + dim
    v_dim = dims_of_columns(rows, v_width, query.dtype.element_ty, exponent_offset > 0)[None, :]
    in_bounds_out = (row < group)[:, None] & (v_dim < v_head_size)
    in_item_out = row[:, None] * v_head_size + v_dim
    is_local: tl.constexpr = window + chunk > 0

    # Of tile i.
    first, first_tile, num_tiles = context_tiles(seq_len, window, chunk, tile_tokens, shared)
    begin = (first_tile + tile) * tile_tokens
    tokens = seq_len - begin  # from the tile's first token to the end of the sequence
    # In its work item; and the spans of its prefix, from bit SPANS_SHIFT on. One number for both: where they were two,
    # Triton 3.6 and 3.7 took the spans of the first iteration for those of all.
    left = num_tiles - 1 - tile + (shared & ~TILES_MASK)
    item = sequence.to(tl.int64) * num_kv_heads + kv_head
    page = kv_head * head_stride
    table = block_table + sequence.to(tl.int64) * table_stride
    blocks = tile_blocks(table, begin, first, seq_len, block_size, is_local, tile_tokens)  # empty range: seq_len is 0
    if pdl:
        prefetch_first_tile(
            table, kv_cache + page, begin, first, seq_len,
            page_size, head_size, v_head_size, block_size, token_stride, value_offset, tile_tokens, contiguous_tokens,
            threads,
        )  # fmt: skip
    if span_slots > 0:  # of the item where the range begins
        first_slot = first_program * span_slots
        num_partials = span_index(first_tile + num_tiles - 1, local_shift) + 2 - first_span
        mean_lse = tl.full([rows, 1], MASK_VALUE, tl.float32)
        mean = tl.zeros([rows, v_width], tl.float32)
        row_sum = tl.zeros([rows, SUMS], tl.float32)
    else:
        first_slot, num_partials = first_program, program - first_program + 1
        row_sum = tl.zeros([rows], tl.float32)
    # The work item that other programs began and that ends here; at most the first one of a range.
    inherited_tiles = tl.where(tile > 0, num_tiles - tile, 0)  # tiles of the range in that work item
    combines = (inherited_tiles > 0) & (count >= inherited_tiles)
    combined_item = item
    source = sequence.to(tl.int64) * query_stride + kv_head * group * head_size
    # Of tile i + 1.
    sequence, kv_head, tile = next_tile(sequence, kv_head, tile, num_tiles, num_kv_heads)
    seq_len = tl.load(seq_lens + sequence, mask=count > 1, other=0)
    if shared_words is None:
        if pdl:
            gdc_wait()
    else:
        shared = tl.load(shared_words + sequence, mask=count > 1, other=0)
        scale_log2 = attend_shared_prefixes(
            query, kv_cache, block_table, units, members, prefixes, prefix_lse, barrier, span_rows, scale_log2,
            softcap_log2, query_stride, table_stride, num_kv_heads, group, block_size, head_size, v_head_size,
            token_stride, value_offset, head_stride, page_size, width, v_width, tile_tokens, passes, pdl,
        )  # fmt: skip
        if passes == PREFIXES:
            return
    row_max = tl.full([rows], MASK_VALUE, tl.float32)
    acc = tl.zeros([rows, v_width], tl.float32)
    for i in tl.range(0, count, num_stages=stages):
        next_first, first_tile, num_tiles = context_tiles(seq_len, window, chunk, tile_tokens, shared)
        next_begin = (first_tile + tile) * tile_tokens
        next_tokens = seq_len - next_begin
        next_left = num_tiles - 1 - tile + (shared & ~TILES_MASK)
        next_item = sequence.to(tl.int64) * num_kv_heads + kv_head
        next_page = kv_head * head_stride
        table = block_table + sequence.to(tl.int64) * table_stride
        next_blocks = tile_blocks(table, next_begin, next_first, seq_len, block_size, is_local, tile_tokens)
        next_source = sequence.to(tl.int64) * query_stride + kv_head * group * head_size
        sequence, kv_head, tile = next_tile(sequence, kv_head, tile, num_tiles, num_kv_heads)
        seq_len = tl.load(seq_lens + sequence, mask=i + 2 < count, other=0)
        if shared_words is not None:
            shared = tl.load(shared_words + sequence, mask=i + 2 < count, other=0)

        # Always masked: a second loop for the last tile of an item would wait for memory with no later load in flight.
        end = begin + tokens
        queries = tl.load(query + source + in_item, mask=in_bounds, other=0.0)
        exponents = kv_cache + exponent_offset + page // head_size  # of the KV head: 2 * block_size for each before it
        row_max, row_sum, acc = attend_tile(
            queries, row_max, row_sum, acc, blocks, kv_cache + page, exponents, begin, first, end, end - 1, scale_log2,
            softcap_log2, page_size, head_size, width, v_head_size, v_width, block_size, token_stride, value_offset,
            exponent_offset, window, chunk, tile_tokens, True,
        )  # fmt: skip

        is_shared = i < inherited_tiles
        is_item_end = (left & TILES_MASK) == 0
        is_end = is_item_end | (i + 1 == count)
        ends = is_end
        if span_slots > 0:
            place = begin // tile_tokens
            ends |= span_end(place, local_shift) == place + 1
        if ends:
            if span_slots > 0:
                result, lse = span_partial(row_max, row_sum, acc)
                result = tl.where(end > 0, result, 0.0)  # 0: an empty sequence
                slot = first_slot + 1 + span_index(place, local_shift) - first_span
                if not is_shared:
                    mean, mean_lse = merge_partials(mean, mean_lse, result, lse)
                    result, lse, slot = mean, mean_lse, program * span_slots
            else:
                end_max, end_sum, end_acc = row_max, row_sum, acc
                if shared_words is not None:  # where the range has the item's first tile
                    end_max, end_sum, end_acc = merge_prefix(
                        row_max, row_sum, acc, prefixes, prefix_lse, tl.where(is_shared, 0, left >> SPANS_SHIFT),
                        item * group, span_rows, rows, group, v_head_size, v_width,
                    )  # fmt: skip
                result = tl.where(end > 0, end_acc / end_sum[:, None], 0.0)
                lse = (end_max + tl.log2(end_sum))[:, None]
                slot = 2 * program + (i >= inherited_tiles).to(tl.int32)
            if is_item_end & (i >= inherited_tiles):
                if sinks is not None:
                    sink = sinks + item % num_kv_heads * group + row
                    result *= sink_share(sink[:, None], (row < group)[:, None], lse)
                target = out + item * group * v_head_size + in_item_out
                tl.store(target, result.to(out.dtype.element_ty), mask=in_bounds_out)
            elif is_shared | is_end:
                target = partials + slot * group * v_head_size + in_item_out
                tl.store(target, pack_partial(result, lse), mask=in_bounds_out)
        if span_slots > 0:
            mean = tl.where(is_end, 0.0, mean)
            mean_lse = tl.where(is_end, MASK_VALUE, mean_lse)
        row_max = tl.where(ends, MASK_VALUE, row_max)
        row_sum = tl.where(ends, 0.0, row_sum)
        acc = tl.where(ends, 0.0, acc)
        source = next_source
        blocks, item, page, begin = next_blocks, next_item, next_page, next_begin
        first, tokens, left = next_first, next_tokens, next_left
    if combines:
        item_sinks = None if sinks is None else sinks + combined_item % num_kv_heads * group
        combined = combine_partials(
            partials, first_slot, num_partials, item_sinks, group, combine_rows, v_head_size, v_width,
            partials_per_round, in_order=span_slots > 0,
        )  # fmt: skip
        combined_row, v_dim = tl.arange(0, combine_rows)[:, None], tl.arange(0, v_width)[None, :]
        tl.store(
            out + combined_item * group * v_head_size + combined_row * v_head_size + v_dim,
            combined.to(out.dtype.element_ty),
            mask=(combined_row < group) & (v_dim < v_head_size),
        )
