"""How the decode kernel's work is cut: evenly over the device, on the device.

The contexts of all (sequence, KV head) pairs, cut into tiles, are one long row of tiles, of which every program of a
fixed grid takes a run of equal length: one long sequence among short ones keeps nobody waiting. (The even cut is
Stream-K's, Osama et al., 2023.)

    pairs     |----- a -----|- b -|------------- c -------------|-- d --|
    programs  |.... 0 ....|.... 1 ....|.... 2 ....|.... 3 ....|.... 4 ....|

A pair that ends in another run has one part more to be added up. So where the pairs are nearly of one length, and no
more than the programs, every pair is cut for itself, into equal parts that are little longer than the runs would be:

    pairs     |------ a ------|----- b -----|------- c -------|----- d -----|
    programs  |.. 0 ..|.. 1 ..|. 2 .|.. 3 ..|.. 4 ...|... 5 ..|. 6 .|.. 7 ..|

The cut depends on the lengths alone. A kernel makes it, once a step for all layers, so nothing of a launch depends on
a number that the host would have to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.decode_merge import UNWRITTEN
from ringcore.kernels.kv_write import padded_head_size

__all__ = ["DecodeTiling", "DecodeWork", "context_tiles"]

# Of a program's record in `DecodeWork.starts`: where its run begins, and whose part comes before.
SEQUENCE = tl.constexpr(0)  # sequence, KV head and tile in the pair where the run begins
HEAD = tl.constexpr(1)
TILE = tl.constexpr(2)
COUNT = tl.constexpr(3)  # tiles in the run
SEQ_LEN = tl.constexpr(4)  # of that sequence
FIRST_PROGRAM = tl.constexpr(5)  # the program that has tile 0 of that pair
RECORD = tl.constexpr(8)

_TILE_BYTES = 16 << 10  # of keys, and as many of values: with two buffers, three programs have room on an SM
_FEW_SEQS = 4  # up to here a step is short, so that ramping up and merging are most of it
# How much longer than the runs of an even cut the parts of pairs may be, and how many tiles at most: to store one part
# more and add it up takes about as long.
_SLACK_PERCENT = tl.constexpr(15)
_MOST_SLACK = tl.constexpr(2)
_MOST_PLACES = 32  # of a thread, in the parts of a pair that are merged at once: registers
_PLANNED_PROGRAMS = 8  # programs of the attention kernel that one of the planning kernel plans


@triton.jit
def context_tiles(seq_len, window: tl.constexpr, tile_tokens: tl.constexpr):
    """(the first token seen, its tile, the number of tiles from there): one tile even where there is no token."""
    first = seq_len * 0
    if window > 0:
        first = tl.maximum(seq_len - window, 0)
    first_tile = first // tile_tokens
    return first, first_tile, tl.maximum(tl.cdiv(seq_len, tile_tokens) - first_tile, 1)


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _plan_decode(
    seq_lens,
    starts,
    num_seqs,
    num_programs,
    num_kv_heads: tl.constexpr,
    window: tl.constexpr,
    tile_tokens: tl.constexpr,
    min_tiles: tl.constexpr,
    skips_empty: tl.constexpr,
    seqs: tl.constexpr,  # num_seqs or more, a power of two
    programs: tl.constexpr,
):
    """Where the runs of `programs` programs begin. Each program adds up all lengths: none waits for another."""
    index = tl.arange(0, seqs)
    seq_len = tl.load(seq_lens + index, mask=index < num_seqs, other=0)
    _, _, tiles = context_tiles(seq_len, window, tile_tokens)
    counted = index < num_seqs
    if skips_empty:
        # Those before the last one that has tokens count: a run goes from one sequence to the next, and passes none.
        counted = index <= tl.max(tl.where(counted & (seq_len > 0), index, -1), 0)
    tiles = tl.where(counted, tiles, 0)  # of a pair
    num_tiles = tl.sum(tiles, 0) * num_kv_heads
    used = tl.minimum(num_programs, tl.maximum(num_tiles // min_tiles, 1))
    base = num_tiles // used  # the first `extra` programs have base + 1 tiles, the others base
    extra = num_tiles % used
    slack = tl.minimum(base * _SLACK_PERCENT // 100, _MOST_SLACK)
    longest = base + tl.maximum((extra > 0).to(tl.int32), slack)
    parts = tl.cdiv(tiles, tl.maximum(longest, 1))  # of a pair
    num_parts = tl.sum(parts, 0) * num_kv_heads
    by_pair = num_parts <= num_programs  # each pair for itself: a program has a part
    used = tl.where(by_pair, num_parts, used)

    # In units, which are parts of pairs or tiles: where each sequence ends, and where the runs begin.
    units = tl.where(by_pair, parts, tiles) * num_kv_heads
    ends = tl.cumsum(units, 0)
    program = tl.program_id(0) * programs + tl.arange(0, programs)
    at = tl.where(by_pair, program, program * base + tl.minimum(program, extra))
    passed = ends[None, :] <= at[:, None]  # [programs, seqs]: sequences that are wholly before the run
    holds = (ends[None, :] > at[:, None]) & ((ends - units)[None, :] <= at[:, None])  # the one in which it begins
    sequence = tl.sum(passed.to(tl.int32), 1)
    in_sequence = at - tl.sum(tl.where(passed, units[None, :], 0), 1)
    pair_units = tl.maximum(tl.sum(tl.where(holds, units[None, :], 0), 1) // num_kv_heads, 1)
    in_pair = in_sequence % pair_units
    # A pair for itself: its first `longer` parts have a tile more than the others.
    pair_tiles = tl.sum(tl.where(holds, tiles[None, :], 0), 1)
    part_tiles = pair_tiles // pair_units
    longer = pair_tiles % pair_units
    tile = tl.where(by_pair, in_pair * part_tiles + tl.minimum(in_pair, longer), in_pair)
    count = tl.where(by_pair, part_tiles + (in_pair < longer).to(tl.int32), base + (program < extra).to(tl.int32))
    # All in one row: the program that has the pair's first tile.
    pair_at = at - in_pair
    before = extra * (base + 1)  # tiles in the runs of base + 1
    in_row = tl.where(pair_at < before, pair_at // (base + 1), extra + (pair_at - before) // tl.maximum(base, 1))
    record = starts + program * RECORD
    mine = program < num_programs
    tl.store(record + SEQUENCE, sequence, mask=mine)
    tl.store(record + HEAD, in_sequence // pair_units, mask=mine)
    tl.store(record + TILE, tile, mask=mine)
    tl.store(record + COUNT, tl.where(program < used, count, 0), mask=mine)
    tl.store(record + SEQ_LEN, tl.sum(tl.where(holds, seq_len[None, :], 0), 1), mask=mine)
    tl.store(record + FIRST_PROGRAM, tl.where(by_pair, pair_at, in_row), mask=mine)


class DecodeTiling(NamedTuple):
    """How the decode kernel goes about its work: of what is known without a length."""

    tile_tokens: int  # keys and values of one iteration
    num_warps: int
    stages: int  # of which a load behind a load has one fewer
    programs_per_sm: int
    min_tiles: int  # of a run: shorter ones save less reading than their merging costs
    merged_at_once: int  # parts of a pair

    @classmethod
    def choose(cls, num_seqs: int, head_size: int, dtype: torch.dtype) -> DecodeTiling:
        """For at most `num_seqs` sequences over caches of `dtype`; measured on H200s, for 8 KV heads of 128 numbers in
        bfloat16. Microseconds of whole passes of Qwen3-8B, then of Qwen3-0.6B:

            | tiling          | 1 x 640 | 4 x 640 | 8 x 640 | 32 x 1,152 | 64 x 1,000 | 256 x 100 to 2,000 |
            | (64, 8, 3, 1, 2)|   3,868 |   4,756 |   4,739 |      6,137 |      7,798 |             19,675 |
            | (64, 4, 3, 2, 2)|   4,708 |   4,818 |   4,698 |      5,619 |      7,122 |             16,680 |
            | (64, 8, 3, 1, 2)|     633 |     920 |   1,100 |      2,295 |            |             11,375 |
            | (64, 4, 3, 2, 2)|     675 |     929 |   1,100 |      1,955 |            |              8,858 |

        Three programs of four warps on an SM, tiles of 32 tokens and a buffer more are slower from 32 sequences on.
        Few sequences are in many parts each, which are merged eight at once: one by one, those of 1 x 640 tokens cost
        1.4% of a pass of Qwen3-8B and 6.7% of Qwen3-0.6B's, of 1 x 2,500 tokens 4.4% and 14%; sixteen are no better.
        Of more sequences each has fewer parts: with four at once in place of one, 8 x 400 tokens gain 0.6% and 3%.
        """
        token_bytes = padded_head_size(head_size) * dtype.itemsize
        tile_tokens = max(16, min(64, _TILE_BYTES // token_bytes))
        if num_seqs <= _FEW_SEQS:
            return cls(tile_tokens, 8, 3, 1, 2, 8)
        return cls(tile_tokens, 4, 3, 2, 2, 4)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The cut of a step's work and the place where programs that share a sequence meet, for layers of one shape.

    Launches that use the same one must follow each other on one stream.
    """

    num_kv_heads: int
    group: int  # query heads that share a KV head
    head_size: int
    window: int | None  # tokens that a token sees, itself among them; None: all before it
    tiling: DecodeTiling
    starts: torch.Tensor  # [num_programs, 8] int32: a record a program, written by `plan`
    partials: torch.Tensor  # [2 * num_programs, group, head_size] int64: `packed`; UNWRITTEN between launches

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        tiling: DecodeTiling,
        device: torch.device,
        *,
        window: int | None = None,
        num_programs: int | None = None,
    ) -> DecodeWork:
        """num_programs: the grid, None for what `device` runs at once."""
        if num_programs is None:
            num_programs = _num_sms(device) * tiling.programs_per_sm
        group = num_heads // num_kv_heads
        unwritten = torch.full((2 * num_programs, group, head_size), UNWRITTEN.value, dtype=torch.int64, device=device)
        return cls(
            num_kv_heads=num_kv_heads,
            group=group,
            head_size=head_size,
            window=window,
            tiling=tiling,
            starts=torch.zeros(num_programs, RECORD.value, dtype=torch.int32, device=device),
            partials=unwritten,
        )

    @property
    def num_programs(self) -> int:
        return self.starts.shape[0]

    def merged_rows(self) -> int:
        """Rows of a part as it is merged: a power of two, and a place or more for each thread (`merge_parts`)."""
        threads = 32 * self.tiling.num_warps
        return max(triton.next_power_of_2(self.group), threads // padded_head_size(self.head_size))

    def merged_at_once(self) -> int:
        """As many parts as the tiling wants and registers have room for."""
        places = self.merged_rows() * padded_head_size(self.head_size) // (32 * self.tiling.num_warps)
        return max(min(self.tiling.merged_at_once, _MOST_PLACES // places), 1)

    def plan(self, seq_lens: torch.Tensor, *, skips_empty: bool = False) -> None:
        """Cuts the work of sequences of seq_lens [num_seqs] int32 tokens, for all launches until the next `plan`.

        A sequence of 0 tokens has one tile. skips_empty: but for those behind the last one that has tokens, for which
        there is no work: padding comes last, while a row that stopped may stand anywhere.

        The kernel is launched and ends as an ordinary one, so that all that stands before it and its own records are
        written when any kernel behind it starts, dependent launch or not.
        """
        num_seqs = seq_lens.shape[0]
        assert seq_lens.dtype == torch.int32
        assert num_seqs > 0
        _plan_decode[(triton.cdiv(self.num_programs, _PLANNED_PROGRAMS),)](
            seq_lens,
            self.starts,
            num_seqs,
            self.num_programs,
            num_kv_heads=self.num_kv_heads,
            window=self.window or 0,
            tile_tokens=self.tiling.tile_tokens,
            min_tiles=self.tiling.min_tiles,
            skips_empty=skips_empty,
            seqs=max(256, triton.next_power_of_2(num_seqs)),  # few sizes: each is compiled
            programs=_PLANNED_PROGRAMS,
        )


def _num_sms(device: torch.device) -> int:
    """The interpreter, on a CPU, gets a few, so that programs share sequences there too."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
