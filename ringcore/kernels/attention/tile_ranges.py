"""The tile range of a program of a decode kernel: its record, which `DecodeTileScheduler.plan` writes."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["context_tiles", "load_range"]

# A program's record in `DecodeTileScheduler.tile_ranges`: where its range begins, and which program holds the first
# split of that work item.
SEQUENCE = tl.constexpr(0)  # sequence, KV head and tile of the work item where the range begins
HEAD = tl.constexpr(1)
TILE = tl.constexpr(2)
COUNT = tl.constexpr(3)  # tiles in the range
SEQ_LEN = tl.constexpr(4)  # of that sequence
FIRST_PROGRAM = tl.constexpr(5)  # the program that has tile 0 of that work item
FIRST_SPAN = tl.constexpr(6)  # with spans: the first span of that work item that this program does not have
SHARED = tl.constexpr(7)  # what precedes tile 0: the word of that sequence, see below
RECORD = tl.constexpr(8)

# A sequence's word in `SharedPrefixes.words`: the tiles that its group reads, and in how many spans. 0: in no group.
SPANS_SHIFT = tl.constexpr(24)
TILES_MASK = tl.constexpr((1 << 24) - 1)


@triton.jit
def load_range(tile_ranges, program):
    """The fields of a program's record, in their order. (.cg: the L1 cache may be stale.)"""
    record = tile_ranges + program * RECORD
    sequence = tl.load(record + SEQUENCE, cache_modifier=".cg")
    head = tl.load(record + HEAD, cache_modifier=".cg")
    tile = tl.load(record + TILE, cache_modifier=".cg")
    count = tl.load(record + COUNT, cache_modifier=".cg")
    seq_len = tl.load(record + SEQ_LEN, cache_modifier=".cg")
    first_program = tl.load(record + FIRST_PROGRAM, cache_modifier=".cg")
    first_span = tl.load(record + FIRST_SPAN, cache_modifier=".cg")
    shared = tl.load(record + SHARED, cache_modifier=".cg")
    return sequence, head, tile, count, seq_len, first_program, first_span, shared


@triton.jit
def context_tiles(seq_len, window: tl.constexpr, chunk: tl.constexpr, tile_tokens: tl.constexpr, shared):
    """(the first visible token, its tile, the number of tiles from there): at least one tile, also for an empty
    sequence. shared: the sequence's word of `SharedPrefixes`; then there is no window and no chunk."""
    first = seq_len * 0
    if window > 0:
        first = tl.maximum(seq_len - window, 0)
    if chunk > 0:
        first = tl.maximum(seq_len - 1, 0) // chunk * chunk
    first_tile = first // tile_tokens + (shared & TILES_MASK)
    return first, first_tile, tl.maximum(tl.cdiv(seq_len, tile_tokens) - first_tile, 1)
