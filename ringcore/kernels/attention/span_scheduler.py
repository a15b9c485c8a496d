"""The tile scheduler of batch-invariant decode attention: that of `decode_scheduler`, with ranges that begin where
spans begin (`attention_spans`).

A program merges the spans of a work item that it has from the first on, and that is one partial: the item's first. Of
an item that another program began it leaves a partial for each span: merged among themselves first, they would be
rounded otherwise. All partials of an item are in neighbouring slots, from the first one of the program that began it
on, into those of the programs between it and the last one, which have no other item.

    spans       |0|1|2|3|4|5|6|7|8|9|          of one work item
    programs    |.. 0 ..|. 1 .|. 2 ..|
    slots       |0 to 3 |4|5|6|7|8|9|          0, 1, 2, ... of program 0, into those of program 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.attention_spans import (
    local_shift,
    span_end,
    span_index,
    span_start,
    span_tile_tokens,
    span_warps,
)
from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler, split_items
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.page_layout import padded_head_size
from ringcore.kernels.attention.tile_ranges import (
    COUNT,
    FIRST_PROGRAM,
    FIRST_SPAN,
    HEAD,
    RECORD,
    SEQ_LEN,
    SEQUENCE,
    TILE,
    context_tiles,
)
from ringcore.kernels.launch.dependent_launch import gdc_wait

__all__ = ["SpanTileScheduler", "span_tiling"]

# Up to here an item has few enough spans for the slots of a program, wherever it is cut.
_FEW_TILES = tl.constexpr(60)


@triton.jit
def _range_of(at, base, extra):
    """Which range holds unit `at`: the first `extra` have base + 1 units, the others base."""
    before = extra * (base + 1)
    base = tl.maximum(base, 1)
    return tl.where(at < before, at // (base + 1), extra + tl.maximum(at - before, 0) // base)


@triton.jit
def _range_start(index, base, extra):
    return index * base + tl.minimum(index, extra)


@triton.jit
def _cut(tile, first_tile, item_tiles, least, preferred, local_shift: tl.constexpr):
    """The tile where a range begins that would begin at `tile` of an item: a span's first, at most as late."""
    cut = span_start(first_tile + tl.maximum(tile, preferred), local_shift) - first_tile
    return tl.where(tile < tl.minimum(least, item_tiles), 0, cut)


@triton.jit
def _begin(
    program,  # [programs]
    seq_len,  # this and the others from `split_items`
    tiles,
    splits,
    by_item,
    base,
    extra,
    num_kv_heads: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    tile_tokens: tl.constexpr,
    local_shift: tl.constexpr,
):
    """Where the range of a program begins -> its sequence, KV head, tile of the work item, and place among all tiles of
    the step; of that item the length, the program that begins it and the first span that that one does not have."""
    # In units (splits if by_item, else tiles): where each sequence ends, and where the ranges begin.
    units = tl.where(by_item, splits, tiles) * num_kv_heads
    ends = tl.cumsum(units, 0)
    at = tl.where(by_item, program, _range_start(program, base, extra))
    passed = ends[None, :] <= at[:, None]  # [programs, seqs]
    holds = (ends[None, :] > at[:, None]) & ((ends - units)[None, :] <= at[:, None])
    in_sequence = at - tl.sum(tl.where(passed, units[None, :], 0), 1)
    item_units = tl.maximum(tl.sum(tl.where(holds, units[None, :], 0), 1) // num_kv_heads, 1)
    item_tiles = tl.sum(tl.where(holds, tiles[None, :], 0), 1)
    length = tl.sum(tl.where(holds, seq_len[None, :], 0), 1)
    head, in_item = in_sequence // item_units, in_sequence % item_units
    before = tl.sum(tl.where(passed, tiles[None, :], 0), 1) * num_kv_heads + head * item_tiles

    # Ranges of the item: those of its splits, or of all tiles from its first on.
    base = tl.where(by_item, item_tiles // item_units, base)
    extra = tl.where(by_item, item_tiles % item_units, extra)
    first_split, origin = tl.where(by_item, at - in_item, 0), tl.where(by_item, 0, before)
    tile = tl.where(by_item, _range_start(in_item, base, extra), in_item)
    first_tile = context_tiles(length, window, chunk, tile_tokens, length * 0)[1]
    # A range that begins early in a long item would have more spans than slots: it begins with the item, or later.
    if local_shift > 0:
        preferred = item_tiles * 0
    else:
        preferred = tl.where(item_tiles > _FEW_TILES, tl.minimum(base + 1, item_tiles) // 2, 0)
    least = tl.maximum(span_end(first_tile, local_shift) - first_tile, preferred // 2)
    first = _range_of(origin + tl.minimum(least, item_tiles) - 1, base, extra)
    after_first = _range_start(first + 1, base, extra) - origin
    after_first = _cut(after_first, first_tile, item_tiles, least, preferred, local_shift)
    first_span = span_index(first_tile + after_first, local_shift)
    tile = _cut(tile, first_tile, item_tiles, least, preferred, local_shift)
    tile = tl.where(item_tiles > 0, tile, 0)  # after the last item
    sequence = tl.sum(passed.to(tl.int32), 1)
    return sequence, head, tile, before + tile, length, first_split + first, first_span


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _plan_spans(
    seq_lens,
    shared_words,  # None: with a shared prefix the sums would be in another order
    tile_ranges,
    num_seqs,
    num_programs,
    num_kv_heads: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    tile_tokens: tl.constexpr,
    min_tiles: tl.constexpr,
    whole_tiles: tl.constexpr,
    skips_empty: tl.constexpr,
    seqs: tl.constexpr,  # num_seqs or more, a power of two
    programs: tl.constexpr,
    pdl: tl.constexpr,
    local_shift: tl.constexpr,
):
    """Writes the tile ranges of `programs` programs, as `_plan_decode` does; each ends where the next one begins."""
    if pdl:
        gdc_wait()
    seq_len, _, tiles, splits, by_item, _, base, extra = split_items(
        seq_lens, shared_words, num_seqs, num_programs, num_kv_heads, window, chunk, tile_tokens, min_tiles,
        whole_tiles, skips_empty, seqs,
    )  # fmt: skip
    program = tl.program_id(0) * programs + tl.arange(0, programs)
    sequence, head, tile, place, length, first_program, first_span = _begin(
        program, seq_len, tiles, splits, by_item, base, extra, num_kv_heads, window, chunk, tile_tokens, local_shift
    )
    next_place = _begin(
        program + 1, seq_len, tiles, splits, by_item, base, extra, num_kv_heads, window, chunk, tile_tokens, local_shift
    )[3]
    next_place = tl.where(program + 1 < num_programs, next_place, tl.sum(tiles, 0) * num_kv_heads)
    record = tile_ranges + program * RECORD
    in_bounds = program < num_programs
    tl.store(record + SEQUENCE, sequence, mask=in_bounds)
    tl.store(record + HEAD, head, mask=in_bounds)
    tl.store(record + TILE, tile, mask=in_bounds)
    tl.store(record + COUNT, next_place - place, mask=in_bounds)
    tl.store(record + SEQ_LEN, length, mask=in_bounds)
    tl.store(record + FIRST_PROGRAM, first_program, mask=in_bounds)
    tl.store(record + FIRST_SPAN, first_span, mask=in_bounds)


def span_tiling(num_seqs: int, head_size: int, dtype: torch.dtype, rows: int) -> DecodeTiling:
    """`DecodeTiling.choose`, with the tiles of spans. rows: of a tile of queries, at least; 64 are a prompt's tile,
    with its warps, and take two thirds of the shared memory."""
    width = padded_head_size(head_size)
    tile_tokens = span_tile_tokens(width, dtype.itemsize)
    tiling = DecodeTiling.choose(num_seqs, head_size, dtype, rows=rows)._replace(tile_tokens=tile_tokens)
    return tiling if rows < 64 else tiling._replace(num_warps=span_warps(width), programs_per_sm=1, stages=4)


@dataclass(frozen=True, slots=True)
class SpanTileScheduler(DecodeTileScheduler):
    """A `DecodeTileScheduler` for spans."""

    span_slots: ClassVar[int] = 32

    @property
    def local_shift(self) -> int:  # type: ignore[override]
        return local_shift(self.window or self.chunk, self.tiling.tile_tokens)

    def _launch_plan(self, grid: tuple[int], *args: object, **constants: object) -> None:
        _plan_spans[grid](*args, **constants, local_shift=self.local_shift)
