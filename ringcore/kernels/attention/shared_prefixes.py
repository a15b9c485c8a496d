"""Finds the decoding sequences of a step that share a prefix: their block tables begin with the same blocks.

A block that several block tables have was found by the hash of its tokens and of all before them (prefix caching), and
is the last of one prefix alone. So two sequences share the prefix up to the last block id that they have in common at
the same place, which a binary search finds. It is done on the device, once per step, from the numbers that attention
reads: a CUDA graph serves steps with and without a shared prefix, in any order of rows, and the host keeps no books.

    sequences      a: 5 6 7 8 | 20     b: 5 6 7 8 | 31 32     c: 5 6 9     d: 40 41
    group          {a, b}, 4 blocks                           others: no group

The prefix of a group is as long as saves most: (sequences - 1) * length is largest. A sequence is in one group at most;
one that shares less than the others is in none. What would save too little is no group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.prefix_tiling import MAX_SEQS, SPAN_TILES, PrefixTiling
from ringcore.kernels.attention.tile_ranges import SPANS_SHIFT, TILES_MASK
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["SharedPrefixes", "find_shared_prefixes"]

# A unit of `SharedPrefixes.units`: some query rows of a group, over a span of its prefix.
KV_HEAD = tl.constexpr(0)
FIRST_MEMBER = tl.constexpr(1)  # into `members`
END_MEMBER = tl.constexpr(2)  # of the group: a unit has at most as many as fit
LEADER = tl.constexpr(3)  # the sequence whose block table is read
FIRST_TILE = tl.constexpr(4)
END_TILE = tl.constexpr(5)
SPAN = tl.constexpr(6)
UNIT = tl.constexpr(8)

_MAX_GROUPS = 16  # that are tried
_MAX_LENGTHS = 32  # that are compared for a group
_UNITS_BLOCK = 128  # units written together


@triton.jit
def _common_granules(
    block_table,
    seq_lens,
    leader,
    num_seqs,
    table_stride,
    granule_blocks: tl.constexpr,
    granule_tokens: tl.constexpr,
    min_granules,
    seqs: tl.constexpr,
):
    """[seqs] int32: the leading granules that each sequence has in common with `leader`; 0 where fewer than
    min_granules. The last token of a sequence is not in them: a sequence has a token of its own."""
    index = tl.arange(0, seqs)
    seq_len = tl.load(seq_lens + index, mask=index < num_seqs, other=0)
    own = tl.maximum(tl.load(seq_lens + leader) - 1, 0) // granule_tokens
    high = tl.minimum(tl.maximum(seq_len - 1, 0) // granule_tokens, own)
    theirs = block_table + index * table_stride - 1  # to the last block of a granule
    its = block_table + leader * table_stride - 1
    # The fewest first: most sequences have not even these in common, and the search ends here.
    fewest = min_granules * granule_blocks
    first = tl.load(its + fewest, mask=own >= min_granules, other=-2)
    has_fewest = tl.load(theirs + fewest, mask=high >= min_granules, other=-1) == first
    low = tl.where(has_fewest, min_granules, 0)
    high = tl.where(has_fewest, high, 0)
    while tl.max(high - low, 0) > 0:
        middle = (low + high + 1) // 2
        is_open = low < high
        at = middle * granule_blocks
        is_equal = tl.load(theirs + at, mask=is_open, other=-1) == tl.load(its + at, mask=is_open, other=-2)
        low = tl.where(is_equal, middle, low)
        high = tl.where(is_open & (is_equal == 0), middle - 1, high)
    return low


@triton.jit
def _num_spans(num_tiles, max_spans, span_tiles: tl.constexpr):
    return tl.minimum(max_spans, num_tiles // span_tiles)


@triton.jit
def _best_length(
    common, max_spans, min_lanes, granule_tiles: tl.constexpr, span_tiles: tl.constexpr, max_lengths: tl.constexpr
):
    """(what is not read again, of what length) by the best group of sequences with `common` granules: (sequences - 1) *
    length, over the different lengths, the longest first."""
    best = tl.max(common, 0) * 0
    length = best
    at = tl.max(common, 0)
    tries = 0
    while (at > 0) & (tries < max_lengths):
        others = tl.sum((common >= at).to(tl.int32), 0) - 1
        is_wide = others * _num_spans(at * granule_tiles, max_spans, span_tiles) >= min_lanes
        saved = tl.where(is_wide, others * at, 0)
        length = tl.where(saved > best, at, length)
        best = tl.maximum(saved, best)
        at = tl.max(tl.where(common < at, common, 0), 0)
        tries += 1
    return best, length


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "min_granules", "max_spans", "min_lanes"])
def _rate_leaders(
    block_table,
    seq_lens,
    savings,
    num_seqs,
    table_stride,
    min_granules,
    max_spans,
    min_lanes,
    granule_blocks: tl.constexpr,
    granule_tokens: tl.constexpr,
    granule_tiles: tl.constexpr,
    span_tiles: tl.constexpr,
    max_lengths: tl.constexpr,
    seqs: tl.constexpr,
    pdl: tl.constexpr,
):
    """savings[i]: granules that a group of which sequence i is one does not read again."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    leader = tl.program_id(0)
    common = _common_granules(
        block_table, seq_lens, leader, num_seqs, table_stride, granule_blocks, granule_tokens, min_granules, seqs
    )
    saving, _ = _best_length(common, max_spans, min_lanes, granule_tiles, span_tiles, max_lengths)
    tl.store(savings + leader, saving)


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "min_granules", "max_spans", "min_lanes", "min_saving"])
def _make_groups(
    block_table,
    seq_lens,
    savings,
    words,
    members,
    units,
    num_seqs,
    table_stride,
    min_granules,
    max_spans,
    min_lanes,
    min_saving,
    granule_blocks: tl.constexpr,
    granule_tokens: tl.constexpr,
    granule_tiles: tl.constexpr,
    span_tiles: tl.constexpr,
    max_lengths: tl.constexpr,
    unit_seqs: tl.constexpr,
    num_kv_heads: tl.constexpr,
    max_groups: tl.constexpr,
    units_block: tl.constexpr,
    seqs: tl.constexpr,
    pdl: tl.constexpr,
):
    """The groups. The first saves most of all. Then savings are upper bounds, since some sequences are in a group by
    now, and what a leader still saves is counted anew."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.arange(0, seqs)
    saving = tl.load(savings + index, mask=index < num_seqs, other=0)
    shared = tl.zeros([seqs], tl.int32)
    num_members = 0
    num_units = 0
    tries = 0
    best = tl.max(saving, 0)
    while (tries < max_groups) & (best >= min_saving):
        leader = tl.min(tl.where(saving == best, index, seqs), 0)
        common = _common_granules(
            block_table, seq_lens, leader, num_seqs, table_stride, granule_blocks, granule_tokens, min_granules, seqs
        )
        common = tl.where(shared == 0, common, 0)
        best, length = _best_length(common, max_spans, min_lanes, granule_tiles, span_tiles, max_lengths)
        saving = tl.where(index == leader, 0, saving)
        if best >= min_saving:
            is_member = common >= length
            count = tl.sum(is_member.to(tl.int32), 0)
            place = num_members + tl.cumsum(is_member.to(tl.int32), 0) - 1
            tl.store(members + place, index, mask=is_member)
            num_tiles = length * granule_tiles
            num_spans = _num_spans(num_tiles, max_spans, span_tiles)
            shared = tl.where(is_member, num_tiles | num_spans << SPANS_SHIFT, shared)
            saving = tl.where(is_member, 0, saving)
            count_here = tl.cdiv(count, unit_seqs) * num_kv_heads * num_spans
            for begin in range(0, count_here, units_block):
                at = begin + tl.arange(0, units_block)
                span = at % num_spans
                pair = at // num_spans
                record = units + (1 + num_units + at) * UNIT
                mask = at < count_here
                first = num_members + pair // num_kv_heads * unit_seqs
                tl.store(record + KV_HEAD, pair % num_kv_heads, mask=mask)
                tl.store(record + FIRST_MEMBER, first, mask=mask)
                tl.store(record + END_MEMBER, tl.minimum(first + unit_seqs, num_members + count), mask=mask)
                tl.store(record + LEADER, leader + at * 0, mask=mask)
                tl.store(record + FIRST_TILE, num_tiles * span // num_spans, mask=mask)
                tl.store(record + END_TILE, num_tiles * (span + 1) // num_spans, mask=mask)
                tl.store(record + SPAN, span, mask=mask)
            num_members += count
            num_units += count_here
        best = tl.max(saving, 0)
        tries += 1
    tl.store(words + index, shared, mask=index < num_seqs)
    tl.store(units, num_units)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which sequences of a step share a prefix, and room for what attention over it gives. Without a group all words
    and the number of units are 0.

    Launches that share an instance must run in order on one stream: the layers of a step.
    """

    words: torch.Tensor  # [num_seqs] int32: of each its prefix's tiles and spans, see `tile_ranges`
    members: torch.Tensor  # [num_seqs] int32: the sequences of the first group, of the second, and so on
    units: torch.Tensor  # [1 + any, 8] int32: how many units there are; then each one's record
    prefixes: torch.Tensor  # [max_spans, num_seqs, num_heads, v_head_size] float32, of one layer after the other
    prefix_lse: torch.Tensor  # [max_spans, num_seqs, num_heads] float32

    @property
    def tiles(self) -> torch.Tensor:
        """[num_seqs] int32: the first tiles of each sequence, which its group reads; 0: in no group."""
        return self.words & TILES_MASK.value


def find_shared_prefixes(block_table: torch.Tensor, seq_lens: torch.Tensor, tiling: PrefixTiling) -> SharedPrefixes:
    """block_table: [num_seqs or more, max_blocks] int32; seq_lens: [num_seqs] int32, as `PrefixTiling.choose` got.

    `DecodeTileScheduler.plan` is to follow, which makes what these kernels write visible to every later one.
    """
    num_seqs, pdl = len(seq_lens), supports_pdl(seq_lens.device)
    assert 0 < num_seqs <= MAX_SEQS
    assert len(block_table) >= num_seqs
    assert {block_table.dtype, seq_lens.dtype} == {torch.int32}
    max_units = (num_seqs // tiling.unit_seqs + _MAX_GROUPS) * tiling.num_kv_heads * tiling.max_spans
    padded = -(-num_seqs // 4) * 4  # aligned for the kernels
    numbers = seq_lens.new_empty(3 * padded + (1 + max_units) * UNIT.value)
    savings, words, members = (numbers[i * padded : i * padded + num_seqs] for i in range(3))
    units = numbers[3 * padded :].view(-1, UNIT.value)
    step = num_seqs, block_table.stride(0), tiling.min_granules, tiling.max_spans, tiling.min_lanes
    common = {
        "granule_blocks": tiling.granule_tokens // tiling.block_size,
        "granule_tokens": tiling.granule_tokens,
        "granule_tiles": tiling.granule_tiles,
        "span_tiles": SPAN_TILES,
        "max_lengths": _MAX_LENGTHS,
        "seqs": max(256, triton.next_power_of_2(num_seqs)),  # few distinct values: each one is a compilation
        "pdl": pdl,
        **launch_options(pdl),
    }
    _rate_leaders[(num_seqs,)](block_table, seq_lens, savings, *step, **common)
    _make_groups[(1,)](
        block_table,
        seq_lens,
        savings,
        words,
        members,
        units,
        *step,
        -(-tiling.min_saved_tiles // tiling.granule_tiles),
        **common,
        unit_seqs=tiling.unit_seqs,
        num_kv_heads=tiling.num_kv_heads,
        max_groups=_MAX_GROUPS,
        units_block=_UNITS_BLOCK,
    )
    rows = tiling.max_spans, num_seqs, tiling.num_kv_heads * tiling.group
    prefixes = seq_lens.new_empty(*rows, tiling.v_head_size, dtype=torch.float32)
    return SharedPrefixes(words, members, units, prefixes, seq_lens.new_empty(rows, dtype=torch.float32))
