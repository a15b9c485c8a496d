"""Attention of one token a sequence over paged keys and values, with the reading spread evenly over the device.

A program has a run of tiles (`decode_work`). If it has all of a (sequence, KV head) pair it writes the result. Programs
that share a pair write what they have (an unnormalised sum, and the maximum and the sum of the weights) and count
themselves in; the last to do so adds it all up, in the order of the programs, so that the result does not depend on who
was last. (FlashAttention's split-KV decoding.)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ringcore.kernels.decode_work import (
    AT,
    BASE,
    COUNT,
    EXTRA,
    HEAD,
    RECORD,
    SEQUENCE,
    TILE,
    DecodeWork,
    context_tiles,
    program_of,
)
from ringcore.kernels.kv_write import check_rows, padded_head_size
from ringcore.kernels.paged_attention_prefill import HIDDEN, attend_tile, paged_attention_prefill_reference

__all__ = ["paged_attention_decode", "paged_attention_decode_reference"]

_STAGES = 5  # of which a load behind the load of its block id gets two buffers
_NUM_WARPS = 4


@triton.jit
def _merge(
    partial_out,
    partial_stats,
    first_program,
    num_parts,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
):
    """What the programs from `first_program` on have of one pair, added up -> [rows, width] float32.

    The first program left its part in its slot 1, since the pair is the last one of its run; the others in slot 0.
    """
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)
    best = tl.full([rows], HIDDEN, tl.float32)
    total = tl.zeros([rows], tl.float32)
    attended = tl.zeros([rows, width], tl.float32)
    for begin in range(0, num_parts, parts):
        part = begin + tl.arange(0, parts)
        slot = 2 * (first_program + part) + (part == 0).to(tl.int32)
        exists = (part < num_parts)[:, None] & (row < group)[None, :]
        at = slot[:, None] * group + row[None, :]
        # Written by other programs of this launch, so read from where all see the same, past the cache of the SM.
        bests = tl.load(partial_stats + at * 2, mask=exists, other=HIDDEN, cache_modifier=".cg")
        totals = tl.load(partial_stats + at * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial_out + at[:, :, None] * head_size + dim[None, None, :],
            mask=exists[:, :, None] & (dim < head_size)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(bests, 0))
        fade = tl.exp2(best - new_best)
        weights = tl.exp2(bests - new_best[None, :])
        total = total * fade + tl.sum(totals * weights, 0)
        attended = attended * fade[:, None] + tl.sum(sums * weights[:, :, None], 0)
        best = new_best
    return attended / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def _paged_attention_decode(
    query,
    kv_cache,
    block_table,
    seq_lens,
    starts,
    out,
    partial_out,
    partial_stats,
    arrivals,
    scale_log2,
    query_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,  # group, rounded up to what a matrix product takes
    merge_rows: tl.constexpr,  # group, rounded up to a power of two
    merge_parts: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
):
    program = tl.program_id(0)
    record = starts + program * RECORD
    sequence = tl.load(record + SEQUENCE)
    kv_head = tl.load(record + HEAD)
    tile = tl.load(record + TILE)
    count = tl.load(record + COUNT)
    at = tl.load(record + AT)
    base = tl.load(record + BASE)
    extra = tl.load(record + EXTRA)
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)[None, :]
    exists = (row < group)[:, None] & (dim < head_size)
    in_pair = row[:, None] * head_size + dim
    while count > 0:
        seq_len = tl.load(seq_lens + sequence)
        first, first_tile, num_tiles = context_tiles(seq_len, window, tile_tokens)
        taken = tl.minimum(count, num_tiles - tile)
        queries = tl.load(
            query + sequence.to(tl.int64) * query_stride + kv_head * group * head_size + in_pair, mask=exists, other=0.0
        )
        table = block_table + sequence.to(tl.int64) * table_stride
        pages = kv_cache + kv_head * block_size * head_size
        best = tl.full([rows], HIDDEN, tl.float32)
        total = tl.zeros([rows], tl.float32)
        attended = tl.zeros([rows, width], tl.float32)
        begin = (first_tile + tile) * tile_tokens
        # Always masked: a second loop for the last tile would wait for memory with nothing under way behind it.
        for start in tl.range(begin, begin + taken * tile_tokens, tile_tokens, num_stages=stages):
            best, total, attended = attend_tile(
                queries, best, total, attended, table, pages, start, first, seq_len, seq_len - 1, scale_log2,
                num_kv_heads, head_size, width, block_size, window, tile_tokens, True,
            )  # fmt: skip
        target = out + (sequence.to(tl.int64) * num_kv_heads + kv_head) * group * head_size
        if taken == num_tiles:
            result = attended / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(target + in_pair, result.to(out.dtype.element_ty), mask=exists)
        else:
            slot = 2 * program + (tile == 0).to(tl.int32)
            stats = partial_stats + (slot * group + row) * 2
            tl.store(partial_out + slot * group * head_size + in_pair, attended, mask=exists)
            tl.store(stats, best, mask=row < group)
            tl.store(stats + 1, total, mask=row < group)
            first_program = program_of(at - tile, base, extra)
            num_parts = program_of(at - tile + num_tiles - 1, base, extra) - first_program + 1
            # All threads have written before one of them counts the program in, and that is seen in this order.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + first_program, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                merged = _merge(
                    partial_out, partial_stats, first_program, num_parts,
                    group, merge_rows, head_size, width, merge_parts,
                )  # fmt: skip
                merge_row = tl.arange(0, merge_rows)[:, None]
                tl.store(
                    target + merge_row * head_size + dim,
                    merged.to(out.dtype.element_ty),
                    mask=(merge_row < group) & (dim < head_size),
                )
                tl.store(arrivals + first_program, 0)  # for the next launch
        at += taken
        count -= taken
        tile = tile * 0
        is_last_head = kv_head == num_kv_heads - 1
        sequence += is_last_head.to(tl.int32)
        kv_head = tl.where(is_last_head, 0, kv_head + 1)


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
    block_table: [num_seqs, max_blocks] int32. seq_lens: [num_seqs] int32, as `work.plan` got them; a sequence of 0
    tokens, which is padding, gives zeros. scale: of the scores, above 0. out: as query, contiguous. Returns `out`.
    """
    num_seqs, num_heads, head_size = check_rows(query)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    assert kv_cache.is_contiguous()
    assert kv_cache.shape[4] == head_size
    assert kv_cache.dtype == query.dtype
    assert (work.num_kv_heads, work.group * num_kv_heads, work.head_size) == (num_kv_heads, num_heads, head_size)
    assert seq_lens.shape == (num_seqs,)
    assert block_table.shape[0] == num_seqs
    assert block_table.stride(1) == 1
    assert {block_table.dtype, seq_lens.dtype} == {torch.int32}
    assert scale > 0
    out = query.new_empty(query.shape) if out is None else out
    assert out.shape == query.shape
    assert out.is_contiguous()
    width, merge_rows = padded_head_size(head_size), triton.next_power_of_2(work.group)
    _paged_attention_decode[(work.num_programs,)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        work.starts,
        out,
        work.partial_out,
        work.partial_stats,
        work.arrivals,
        scale * math.log2(math.e),
        query.stride(0),
        block_table.stride(0),
        num_kv_heads=num_kv_heads,
        group=work.group,
        rows=max(16, merge_rows),
        merge_rows=merge_rows,
        merge_parts=max(1, min(16, 8192 // (merge_rows * width))),  # as many as registers have room for
        head_size=head_size,
        width=width,
        block_size=block_size,
        window=work.window or 0,
        tile_tokens=work.tile_tokens,
        stages=_STAGES,
        num_warps=_NUM_WARPS,
    )
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
