"""Attention of one token a sequence over paged keys and values, with the reading spread evenly over the device.

A program has a run of tiles (`decode_work`). If it has all of a (sequence, KV head) pair it writes the result. Programs
that share a pair leave what they have in a scratch, and the one that has the pair's end adds it all up once its own run
is done (`decode_merge`). (FlashAttention's split-KV decoding.)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention_tile import HIDDEN, attend_tile, tile_blocks
from ringcore.kernels.decode_merge import merge_parts, packed
from ringcore.kernels.decode_work import (
    COUNT,
    FIRST_PROGRAM,
    HEAD,
    RECORD,
    SEQ_LEN,
    SEQUENCE,
    TILE,
    DecodeWork,
    context_tiles,
)
from ringcore.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, overlaps_launches
from ringcore.kernels.kv_write import check_rows, padded_head_size
from ringcore.kernels.paged_attention_prefill import paged_attention_prefill_reference
from ringcore.kernels.prefetch import ask_for
from ringcore.kernels.shared_memory import set_aside

__all__ = ["paged_attention_decode", "paged_attention_decode_reference"]

_QUERY_BYTES = 16 << 10  # the most of which shared memory has room for two beside two tiles of keys and values


@triton.jit
def _ask_for_tile(
    table,
    pages,
    begin,
    first,
    end,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    piece: tl.constexpr,
    threads: tl.constexpr,
):
    """Keys and values of the first tile, each piece of them by one thread. A write meanwhile goes to the same place."""
    half_page: tl.constexpr = num_kv_heads * block_size * head_size
    piece_bytes: tl.constexpr = piece * head_size * (pages.dtype.element_ty.primitive_bitwidth // 8)
    thread = tl.arange(0, threads)
    token = begin + thread // 2 * piece
    exists = (token < begin + tile_tokens) & (token + piece > first) & (token < end)
    block = tl.load(table + token // block_size, mask=exists, other=0)
    places = block.to(tl.int64) * (2 * half_page) + thread % 2 * half_page + token % block_size * head_size
    ask_for(pages + places, exists, piece_bytes)


@triton.jit
def _behind(sequence, kv_head, tile, num_tiles, num_kv_heads: tl.constexpr):
    """(sequence, KV head, tile) of the tile that follows in the row of all tiles; num_tiles: of this one's pair."""
    is_last = tile + 1 >= num_tiles
    is_last_head = is_last & (kv_head == num_kv_heads - 1)
    next_head = tl.where(is_last_head, 0, kv_head + is_last.to(tl.int32))
    return sequence + is_last_head.to(tl.int32), next_head, tl.where(is_last, 0, tile + 1)


@triton.jit(do_not_specialize=["table_stride"])
def _paged_attention_decode(
    query,
    kv_cache,
    block_table,
    seq_lens,
    starts,
    out,
    partials,
    scale_log2,
    query_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,  # group, rounded up to what a matrix product takes
    merged_rows: tl.constexpr,
    merged_at_once: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    piece: tl.constexpr,  # tokens that lie side by side in every block
    threads: tl.constexpr,
    pdl: tl.constexpr,
):
    """One loop over all tiles of the run, whatever pairs they belong to: the keys of a pair's first tiles are on their
    way while the pair before it ends.

    Iteration i attends to tile i, loads the block ids of tile i + 1 and the length of tile i + 2's sequence: no
    address depends on a load of the same iteration. What is carried from one iteration to the next is computed in it; a
    value that is only handed on keeps the compiler from overlapping iterations at all.
    """
    if pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # The plan and the tables are a step's, not a layer's: they stood before the first kernel behind `DecodeWork.plan`
    # could start, so they may be read before the wait. (Past the cache of the SM, which may remember another step.)
    record = starts + program * RECORD
    sequence = tl.load(record + SEQUENCE, cache_modifier=".cg")
    kv_head = tl.load(record + HEAD, cache_modifier=".cg")
    tile = tl.load(record + TILE, cache_modifier=".cg")
    count = tl.load(record + COUNT, cache_modifier=".cg")
    seq_len = tl.load(record + SEQ_LEN, cache_modifier=".cg")
    first_program = tl.load(record + FIRST_PROGRAM, cache_modifier=".cg")
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)[None, :]
    exists = (row < group)[:, None] & (dim < head_size)
    in_pair = row[:, None] * head_size + dim

    # Of tile i.
    first, first_tile, num_tiles = context_tiles(seq_len, window, tile_tokens)
    begin = (first_tile + tile) * tile_tokens
    tokens = seq_len - begin  # from the tile's first one on
    tiles_behind = num_tiles - 1 - tile  # in its pair
    pair = sequence.to(tl.int64) * num_kv_heads + kv_head
    page = kv_head * block_size * head_size
    table = block_table + sequence.to(tl.int64) * table_stride
    blocks = tile_blocks(table, begin, first, seq_len, block_size, window, tile_tokens)  # no work: seq_len is 0
    if pdl:
        _ask_for_tile(
            table, kv_cache + page, begin, first, seq_len,
            num_kv_heads, head_size, block_size, tile_tokens, piece, threads,
        )  # fmt: skip
    # The pair that others began and that ends here; no other pair of this run is one.
    begun = tl.where(tile > 0, num_tiles - tile, 0)  # tiles of the run that are of a pair which others began
    merges = (begun > 0) & (count >= begun)
    merged_pair = pair
    source = sequence.to(tl.int64) * query_stride + kv_head * group * head_size
    # Of tile i + 1.
    sequence, kv_head, tile = _behind(sequence, kv_head, tile, num_tiles, num_kv_heads)
    seq_len = tl.load(seq_lens + sequence, mask=count > 1, other=0)
    if pdl:
        gdc_wait()
    best = tl.full([rows], HIDDEN, tl.float32)
    total = tl.zeros([rows], tl.float32)
    attended = tl.zeros([rows, width], tl.float32)
    for i in tl.range(0, count, num_stages=stages):
        next_first, first_tile, num_tiles = context_tiles(seq_len, window, tile_tokens)
        next_begin = (first_tile + tile) * tile_tokens
        next_tokens = seq_len - next_begin
        next_tiles_behind = num_tiles - 1 - tile
        next_pair = sequence.to(tl.int64) * num_kv_heads + kv_head
        next_page = kv_head * block_size * head_size
        table = block_table + sequence.to(tl.int64) * table_stride
        next_blocks = tile_blocks(table, next_begin, next_first, seq_len, block_size, window, tile_tokens)
        next_source = sequence.to(tl.int64) * query_stride + kv_head * group * head_size
        sequence, kv_head, tile = _behind(sequence, kv_head, tile, num_tiles, num_kv_heads)
        seq_len = tl.load(seq_lens + sequence, mask=i + 2 < count, other=0)

        # Always masked: a second loop for a pair's last tile would wait for memory with nothing under way behind it.
        end = begin + tokens
        queries = tl.load(query + source + in_pair, mask=exists, other=0.0)
        best, total, attended = attend_tile(
            queries, best, total, attended, blocks, kv_cache + page, begin, first, end, end - 1, scale_log2,
            num_kv_heads, head_size, width, block_size, window, tile_tokens, True,
        )  # fmt: skip

        is_pair_end = tiles_behind == 0
        is_end = is_pair_end | (i + 1 == count)
        if is_end:
            result = tl.where(end > 0, attended / total[:, None], 0.0)  # 0: of a sequence of no tokens
            if is_pair_end & (i >= begun):
                tl.store(out + pair * group * head_size + in_pair, result.to(out.dtype.element_ty), mask=exists)
            else:
                slot = 2 * program + (i >= begun).to(tl.int32)
                part = packed(result, (best + tl.log2(total))[:, None])
                tl.store(partials + slot * group * head_size + in_pair, part, mask=exists)
        best = tl.where(is_end, HIDDEN, best)
        total = tl.where(is_end, 0.0, total)
        attended = tl.where(is_end, 0.0, attended)
        source = next_source
        blocks, pair, page, begin = next_blocks, next_pair, next_page, next_begin
        first, tokens, tiles_behind = next_first, next_tokens, next_tiles_behind
    if merges:
        num_parts = program - first_program + 1
        merged = merge_parts(partials, first_program, num_parts, group, merged_rows, head_size, width, merged_at_once)
        merged_row = tl.arange(0, merged_rows)[:, None]
        tl.store(
            out + merged_pair * group * head_size + merged_row * head_size + dim,
            merged.to(out.dtype.element_ty),
            mask=(merged_row < group) & (dim < head_size),
        )


def paged_attention_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    work: DecodeWork,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with the last token of each sequence to all of it, or to the last `work.window` tokens.

    query: [num_seqs, num_heads, head_size]; tokens may lie apart, the heads of one may not.
    kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_size], with the keys and values of these tokens too.
    block_table: [num_seqs or more, max_blocks] int32. seq_lens: [num_seqs] int32, as `work.plan` got them; a sequence
    of 0 tokens gives zeros, or is left alone where the plan has no work for it. scale: of the scores, above 0.
    out: as query, contiguous. Returns `out`.
    `work.plan` read the same numbers in the same step: what is written to the tables after it may not be seen.
    """
    num_seqs, num_heads, head_size = check_rows(query)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    assert kv_cache.is_contiguous()
    assert kv_cache.shape[4] == head_size
    assert kv_cache.dtype == query.dtype
    assert (work.num_kv_heads, work.group * num_kv_heads, work.head_size) == (num_kv_heads, num_heads, head_size)
    assert seq_lens.shape == (num_seqs,)
    assert block_table.shape[0] >= num_seqs
    assert block_table.stride(1) == 1
    assert {block_table.dtype, seq_lens.dtype} == {torch.int32}
    assert scale > 0
    out = query.new_empty(query.shape) if out is None else out
    assert out.shape == query.shape
    assert out.is_contiguous()
    width, rows = padded_head_size(head_size), max(16, triton.next_power_of_2(work.group))
    fits_twice = rows * width * query.element_size() <= _QUERY_BYTES
    pdl = overlaps_launches(query.device)
    kernel = _paged_attention_decode[(work.num_programs,)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        work.starts,
        out,
        work.partials,
        scale * math.log2(math.e),
        query.stride(0),
        block_table.stride(0),
        num_kv_heads=num_kv_heads,
        group=work.group,
        rows=rows,
        merged_rows=work.merged_rows(),
        merged_at_once=work.merged_at_once(),
        head_size=head_size,
        width=width,
        block_size=block_size,
        window=work.window or 0,
        tile_tokens=work.tiling.tile_tokens,
        stages=work.tiling.stages if fits_twice else 1,
        piece=math.gcd(block_size, work.tiling.tile_tokens),
        threads=32 * work.tiling.num_warps,
        pdl=pdl,
        num_warps=work.tiling.num_warps,
        **launch_options(pdl),
    )
    if pdl:
        set_aside(kernel, work.tiling.programs_per_sm, query.device)
    return out


def paged_attention_decode_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    work: DecodeWork,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention_decode`, sequence by sequence, computed in float32; of `work` it takes the window alone."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return paged_attention_prefill_reference(
        query, kv_cache, block_table, seq_lens, starts, scale, max_query_len=1, window=work.window, out=out
    )
