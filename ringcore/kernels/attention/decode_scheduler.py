"""The tile scheduler of split-KV decode attention: it balances the KV tiles over a fixed grid, on the device.

A work item is a (sequence, KV head) pair; its context is a row of tiles. The scheduler lays the tiles of all work items
end to end and gives every program of a fixed grid a tile range of equal length, so one long sequence in a batch of
short ones does not unbalance the grid. (The even split is Stream-K's, Osama et al., 2023.)

    work items  |----- a -----|- b -|------------- c -------------|-- d --|
    programs    |.... 0 ....|.... 1 ....|.... 2 ....|.... 3 ....|.... 4 ....|

A work item that ends in another program's range costs one more split-KV partial to combine. So where the work items
have similar lengths, and there are no more of them than programs, the scheduler splits every work item by itself, into
equal splits that are little longer than the even ranges:

    work items  |------ a ------|----- b -----|------- c -------|----- d -----|
    programs    |.. 0 ..|.. 1 ..|. 2 .|.. 3 ..|.. 4 ...|... 5 ..|. 6 .|.. 7 ..|

Multiprocessors differ in how fast they read. So even ranges may be shorter and followed by a tail: as many more
programs, each with a small part, which the device starts where others have ended.

    work items  |----- a -----|- b -|------------- c -------------|-- d --|
    programs    |.... 0 ....|.... 1 ....|.... 2 ....|.... 3 ....|4|5|6|7|

A program waits for partials of earlier ones alone, and those start before it. The schedule depends on the sequence
lengths alone. A kernel computes it once per step for all layers, so no launch argument depends on a number that the
host would have to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.page_layout import padded_head_size
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN
from ringcore.kernels.attention.tile_ranges import (
    COUNT,
    FIRST_PROGRAM,
    HEAD,
    RECORD,
    SEQ_LEN,
    SEQUENCE,
    SHARED,
    TILE,
    context_tiles,
)
from ringcore.kernels.launch.dependent_launch import gdc_wait, launch_options, supports_pdl

__all__ = ["DecodeTileScheduler", "split_items"]

# How much longer than the ranges of an even split the splits of a work item may be, in percent and in tiles: one more
# partial costs about as much.
_SLACK_PERCENT = tl.constexpr(15)
_MAX_SLACK_TILES = tl.constexpr(2)
_MAX_ELEMENTS_PER_THREAD = 32  # in the partials of one combine round: registers
_FEW_SEQS = 16  # a plan of 256 takes 4 us
_PROGRAMS_PER_PLANNER = 8  # programs of the attention kernel that one program of the planning kernel schedules


@triton.jit
def split_items(
    seq_lens,
    shared_words,
    num_seqs,
    num_programs,
    num_kv_heads: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    tile_tokens: tl.constexpr,
    min_tiles: tl.constexpr,
    whole_tiles: tl.constexpr,
    skips_empty: tl.constexpr,
    seqs: tl.constexpr,
):
    """-> of each of `seqs` sequences its length, its shared word, and a work item's tiles and splits; whether programs
    have a split each, else `used` of them ranges: the first `extra` of base + 1 tiles, the others of base."""
    index = tl.arange(0, seqs)
    seq_len = tl.load(seq_lens + index, mask=index < num_seqs, other=0)
    shared = seq_len * 0
    if shared_words is not None:
        shared = tl.load(shared_words + index, mask=index < num_seqs, other=0)
    _, _, tiles = context_tiles(seq_len, window, chunk, tile_tokens, shared)
    is_counted = index < num_seqs
    if skips_empty:
        # Sequences up to the last non-empty one count: a range crosses from one sequence to the next and skips none.
        is_counted = index <= tl.max(tl.where(is_counted & (seq_len > 0), index, -1), 0)
    tiles = tl.where(is_counted, tiles, 0)  # of a work item
    num_tiles = tl.sum(tiles, 0) * num_kv_heads
    used = tl.minimum(num_programs, tl.maximum(num_tiles // min_tiles, 1))
    base = num_tiles // used
    extra = num_tiles % used
    slack = tl.minimum(base * _SLACK_PERCENT // 100, _MAX_SLACK_TILES)
    max_tiles = base + tl.maximum((extra > 0).to(tl.int32), slack)
    max_tiles = tl.maximum(max_tiles, 1)
    if whole_tiles > 0:
        max_tiles = tl.where(tiles <= whole_tiles, tl.maximum(max_tiles, whole_tiles), max_tiles)
    splits = tl.cdiv(tiles, max_tiles)  # of a work item
    num_splits = tl.sum(splits, 0) * num_kv_heads
    by_item = num_splits <= num_programs  # one split per program
    return seq_len, shared, tiles, splits, by_item, tl.where(by_item, num_splits, used), base, extra


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "tail_percent"])
def _plan_decode(
    seq_lens,
    shared_words,  # or None
    tile_ranges,
    num_seqs,
    num_programs,
    tail_percent,  # of `DecodeTiling`; a constant would be a variant, compiled by the first step of many rows
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
):
    """Writes the tile ranges of `programs` programs. Each program sums all lengths itself: no program waits for
    another. num_programs: those that run at once; with a tail as many follow."""
    if pdl:
        gdc_wait()
    seq_len, shared, tiles, splits, by_item, used, base, extra = split_items(
        seq_lens, shared_words, num_seqs, num_programs, num_kv_heads, window, chunk, tile_tokens, min_tiles,
        whole_tiles, skips_empty, seqs,
    )  # fmt: skip
    # Programs of the tail start when others have ended, and so may not wait for a barrier over shared prefixes.
    tail_base = tl.where(by_item | (tl.max(shared, 0) > 0), 0, base * tail_percent // 100)
    base -= tail_base
    tail_at = num_programs * base + extra  # the first tile of the tail
    # In units (splits if by_item, else tiles): where each sequence ends, and where the ranges begin.
    units = tl.where(by_item, splits, tiles) * num_kv_heads
    ends = tl.cumsum(units, 0)
    program = tl.program_id(0) * programs + tl.arange(0, programs)
    in_tail = (tail_base > 0) & (program >= num_programs)
    at = tl.where(by_item, program, program * base + tl.minimum(program, extra))
    at = tl.where(in_tail, tail_at + (program - num_programs) * tail_base, at)
    passed = ends[None, :] <= at[:, None]  # [programs, seqs]: sequences wholly before the range
    # [programs, seqs]: the sequence in which the range begins
    holds = (ends[None, :] > at[:, None]) & ((ends - units)[None, :] <= at[:, None])
    sequence = tl.sum(passed.to(tl.int32), 1)
    in_sequence = at - tl.sum(tl.where(passed, units[None, :], 0), 1)
    item_units = tl.maximum(tl.sum(tl.where(holds, units[None, :], 0), 1) // num_kv_heads, 1)
    in_item = in_sequence % item_units
    # If by_item: the first `longer` splits of a work item have one tile more than the others.
    item_tiles = tl.sum(tl.where(holds, tiles[None, :], 0), 1)
    split_tiles = item_tiles // item_units
    longer = item_tiles % item_units
    tile = tl.where(by_item, in_item * split_tiles + tl.minimum(in_item, longer), in_item)
    count = tl.where(by_item, split_tiles + (in_item < longer).to(tl.int32), base + (program < extra).to(tl.int32))
    count = tl.where(in_tail, tail_base, tl.where(program < used, count, 0))
    # Otherwise: the program that has the work item's first tile.
    item_at = at - in_item
    before = extra * (base + 1)  # tiles in the ranges of base + 1
    owner = tl.where(item_at < before, item_at // (base + 1), extra + (item_at - before) // tl.maximum(base, 1))
    of_tail = num_programs + (item_at - tail_at) // tl.maximum(tail_base, 1)
    owner = tl.where((tail_base > 0) & (item_at >= tail_at), of_tail, owner)
    record = tile_ranges + program * RECORD
    in_bounds = program < num_programs * tl.where(tail_percent > 0, 2, 1)
    tl.store(record + SEQUENCE, sequence, mask=in_bounds)
    tl.store(record + HEAD, in_sequence // item_units, mask=in_bounds)
    tl.store(record + TILE, tile, mask=in_bounds)
    tl.store(record + COUNT, count, mask=in_bounds)
    tl.store(record + SEQ_LEN, tl.sum(tl.where(holds, seq_len[None, :], 0), 1), mask=in_bounds)
    tl.store(record + FIRST_PROGRAM, tl.where(by_item, item_at, owner), mask=in_bounds)
    if shared_words is not None:
        tl.store(record + SHARED, tl.sum(tl.where(holds, shared[None, :], 0), 1), mask=in_bounds)


@dataclass(frozen=True, slots=True)
class DecodeTileScheduler:
    """The tile ranges of a step and the split-KV workspace of the decode kernel, for layers of one shape.

    Launches that share an instance must run in order on one stream.
    """

    num_kv_heads: int
    group: int  # query heads that share a KV head
    head_size: int  # of keys
    v_head_size: int  # of values, and of the output
    window: int | None  # sliding window, the query token included; None: none
    chunk: int | None  # of chunked attention; None: none
    tiling: DecodeTiling
    tile_ranges: torch.Tensor  # [num_programs, 8] int32: one record per program, written by `plan`
    partials: torch.Tensor  # [slots, group, v_head_size] int64: `pack_partial`; UNWRITTEN between launches
    barrier: torch.Tensor  # [2] int32: of `grid_barrier`
    span_slots: ClassVar[int] = 0  # of a program, for partials of spans; 0: without spans a program has two slots
    local_shift: ClassVar[int] = 0  # of spans

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        tiling: DecodeTiling,
        device: torch.device,
        *,
        v_head_size: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        num_programs: int | None = None,
    ) -> Self:
        """v_head_size: None: head_size. num_programs: the grid; None: as many programs as `device` runs at once."""
        v_head_size = head_size if v_head_size is None else v_head_size
        if num_programs is None:
            num_programs = _num_sms(device) * tiling.programs_per_sm
        group = num_heads // num_kv_heads
        num_ranges = num_programs * (2 if tiling.tail_percent else 1)
        shape = ((cls.span_slots or 2) * num_ranges, group, v_head_size)
        return cls(
            num_kv_heads=num_kv_heads,
            group=group,
            head_size=head_size,
            v_head_size=v_head_size,
            window=window,
            chunk=chunk,
            tiling=tiling,
            tile_ranges=torch.zeros(num_ranges, RECORD.value, dtype=torch.int32, device=device),
            partials=torch.full(shape, UNWRITTEN.value, dtype=torch.int64, device=device),
            barrier=torch.zeros(2, dtype=torch.int32, device=device),
        )

    @property
    def num_ranges(self) -> int:
        return self.tile_ranges.shape[0]

    @property
    def num_programs(self) -> int:
        """Those that run at once: without those of the tail."""
        return self.num_ranges // (2 if self.tiling.tail_percent else 1)

    @property
    def tile_rows(self) -> int:
        """Of queries, those of a group."""
        return max(self.tiling.rows, triton.next_power_of_2(self.group))

    def combine_rows(self) -> int:
        """Rows of a partial in the combine: a power of two, and one element or more per thread (`combine_partials`)."""
        threads = 32 * self.tiling.num_warps
        return max(triton.next_power_of_2(self.group), threads // padded_head_size(self.v_head_size))

    def partials_per_round(self) -> int:
        """The tiling's number of partials per round, limited by the registers of a thread."""
        elements = self.combine_rows() * padded_head_size(self.v_head_size) // (32 * self.tiling.num_warps)
        return max(min(self.tiling.partials_per_round, _MAX_ELEMENTS_PER_THREAD // elements), 1)

    def plan(self, seq_lens: torch.Tensor, shared: torch.Tensor | None = None, *, skips_empty: bool = False) -> None:
        """Schedules sequences of seq_lens [num_seqs] int32 tokens, for all launches until the next `plan`.

        An empty sequence has one tile. skips_empty: the empty sequences after the last non-empty one get none: padding
        comes last, while a stopped row may be anywhere. shared: the words of `SharedPrefixes`, [num_seqs] int32: a
        context begins after the prefix that its group reads; without window and chunk.

        The kernel waits for all before it at once and does not launch its dependents, so everything written before it,
        and its own tile ranges, are visible to every later kernel, dependent launch or not.
        """
        num_seqs, pdl = seq_lens.shape[0], supports_pdl(seq_lens.device)
        assert seq_lens.dtype == torch.int32
        assert num_seqs > 0
        assert shared is None or (self.window is None and self.chunk is None and not self.span_slots)
        self._launch_plan(
            (triton.cdiv(self.num_ranges, _PROGRAMS_PER_PLANNER),),
            seq_lens,
            shared,
            self.tile_ranges,
            num_seqs,
            self.num_programs,
            num_kv_heads=self.num_kv_heads,
            window=self.window or 0,
            chunk=self.chunk or 0,
            tile_tokens=self.tiling.tile_tokens,
            min_tiles=self.tiling.min_tiles,
            whole_tiles=self.tiling.whole_tiles,
            skips_empty=skips_empty,
            seqs=_padded_seqs(num_seqs, is_captured=skips_empty),
            programs=_PROGRAMS_PER_PLANNER,
            pdl=pdl,
            **launch_options(pdl),
        )

    def _launch_plan(self, grid: tuple[int], *args: object, **constants: object) -> None:
        _plan_decode[grid](*args, **constants, tail_percent=self.tiling.tail_percent)


def _padded_seqs(num_seqs: int, is_captured: bool) -> int:
    """Few values: each is a compilation, and steps that are not captured have any number of sequences."""
    return _FEW_SEQS if is_captured and num_seqs <= _FEW_SEQS else max(256, triton.next_power_of_2(num_seqs))


def _num_sms(device: torch.device) -> int:
    """On the interpreter's CPU a few, so that programs share sequences there too."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
