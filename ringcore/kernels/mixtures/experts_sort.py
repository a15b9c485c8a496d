"""Tokens sorted by expert, on the device: which pairs of a token and an expert each expert has.

A counting sort, stable, without atomics: nothing depends on the order in which programs run, and nothing is asked for
on the host. Of few pairs one launch, a program an expert, each of which reads all pairs; of many two, a program a chunk
of pairs: their counts, then their places behind those of the chunks before. Of few tokens the launch lists the work
items of the grouped products instead: a search in each of thousands of short programs would take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["SortedPairs", "WorkItems", "list_items", "max_items", "sort_pairs", "sort_pairs_reference"]

_MAX_BLOCK = 2048
_MAX_SCANNED = 4096  # pairs that every program reads
_CHUNK, _AT_ONCE = 256, tl.constexpr(32)
_MIN_BINS = 32  # of a histogram: a thread of a warp has one or more


class SortedPairs(NamedTuple):
    """Pairs by expert, those of one expert by token; pairs with experts of other ranks are left out."""

    order: torch.Tensor  # [num_pairs] int32, pairs; undefined from offsets[-1] on
    offsets: torch.Tensor  # [num_experts + 1] int32: where the pairs of each expert begin


class WorkItems(NamedTuple):
    """Tiles of the sorted pairs, expert by expert."""

    pairs: torch.Tensor  # [items, block_rows] int32; behind the last pair of an expert its first one
    heads: torch.Tensor  # [items, 2] int32: the expert, and how many pairs it has from the item's first on; 0: no item


@triton.jit(do_not_specialize=["num_pairs", "first", "num_items"])
def _items_kernel(
    experts,  # [num_pairs] int32 or int64
    pairs,  # these two: see `WorkItems`
    heads,
    num_pairs,  # int
    first,  # int, the expert of program 0
    num_items,  # int
    num_experts: tl.constexpr,
    block_experts: tl.constexpr,
    block: tl.constexpr,  # num_pairs or more
    block_items: tl.constexpr,  # num_items or more
    block_rows: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i lists the items of expert i, behind those of the experts before."""
    expert = tl.program_id(0)
    pair, item = tl.arange(0, block), tl.arange(0, block_items)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first
    is_here = (pair < num_pairs) & (found >= 0) & (found < num_experts)
    counts = tl.histogram(tl.where(is_here, found, 0), block_experts, mask=is_here)
    tiles = (counts + block_rows - 1) // block_rows
    first_item = tl.sum(tl.where(tl.arange(0, block_experts) < expert, tiles, 0))
    is_own = is_here & (found == expert)
    num_own = tl.sum(is_own.to(tl.int32))
    num_tiles = (num_own + block_rows - 1) // block_rows
    own = pairs + first_item * block_rows
    tl.store(own + tl.cumsum(is_own.to(tl.int32), 0) - 1, pair, mask=is_own)
    behind = num_own + tl.arange(0, block_rows)
    first_pair = tl.min(tl.where(is_own, pair, block))
    tl.store(own + behind, first_pair + behind * 0, mask=behind < num_tiles * block_rows)
    tl.store(heads + (first_item + item) * 2, expert + item * 0, mask=item < num_tiles)
    tl.store(heads + (first_item + item) * 2 + 1, num_own - item * block_rows, mask=item < num_tiles)
    is_rest = (expert == num_experts - 1) & (item >= first_item + num_tiles) & (item < num_items)
    tl.store(heads + item * 2 + 1, item * 0, mask=is_rest)


@triton.jit(do_not_specialize=["num_pairs", "first"])
def _sort_kernel(
    experts,  # [num_pairs] int32 or int64
    order,  # [num_pairs] int32
    offsets,  # [num_experts + 1] int32
    num_pairs,  # int
    first,  # int, the expert of program 0
    num_experts: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A program counts the pairs of the experts before its own, then writes those of its own behind them. All read the
    same indices, 8 bytes a pair: of 1,024 tokens with 8 experts each 64 KiB, which the L2 cache has."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    before = expert * 0
    own = expert * 0
    for at in range(0, num_pairs, block):
        in_bounds = lanes < num_pairs - at
        found = tl.load(experts + at + lanes, mask=in_bounds, other=0).to(tl.int32) - first
        before += tl.sum((in_bounds & (found >= 0) & (found < expert)).to(tl.int32))
        own += tl.sum((in_bounds & (found == expert)).to(tl.int32))
    tl.store(offsets + expert, before)
    if expert == num_experts - 1:
        tl.store(offsets + num_experts, before + own)
    place = before
    if own > 0:
        for at in range(0, num_pairs, block):
            in_bounds = lanes < num_pairs - at
            found = tl.load(experts + at + lanes, mask=in_bounds, other=0).to(tl.int32) - first
            is_own = (in_bounds & (found == expert)).to(tl.int32)
            tl.store(order + place + tl.cumsum(is_own, 0) - 1, at + lanes, mask=is_own > 0)
            place += tl.sum(is_own)


@triton.jit
def _load_experts(experts, pairs, num_pairs, first, num_experts: tl.constexpr):
    """Of pairs, as indices of this rank's; num_experts where it has not that one."""
    found = tl.load(experts + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) - first
    return tl.where((pairs < num_pairs) & (found >= 0) & (found < num_experts), found, num_experts)


@triton.jit(do_not_specialize=["num_pairs", "first"])
def _count_kernel(
    experts,  # [num_pairs] int32 or int64
    counts,  # [num_chunks, num_experts] int32
    num_pairs,  # int
    first,  # int
    num_experts: tl.constexpr,
    block_experts: tl.constexpr,
    chunk: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i counts the pairs of each expert in chunk i."""
    expert = tl.arange(0, block_experts)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.zeros([block_experts, _AT_ONCE], tl.int32)
    for at in tl.static_range(0, chunk, _AT_ONCE):
        pairs = tl.program_id(0) * chunk + at + tl.arange(0, _AT_ONCE)
        own = _load_experts(experts, pairs, num_pairs, first, num_experts)
        found += (own[None, :] == expert[:, None]).to(tl.int32)
    targets = counts + tl.program_id(0) * num_experts + expert
    tl.store(targets, tl.sum(found, 1), mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_chunks"])
def _place_kernel(
    experts,  # [num_pairs] int32 or int64
    counts,  # [num_chunks, num_experts] int32
    places,  # [num_chunks, num_experts] int32, written and read by one program
    order,  # [num_pairs] int32
    offsets,  # [num_experts + 1] int32
    num_pairs,  # int
    first,  # int
    num_chunks,  # int
    num_experts: tl.constexpr,
    block_experts: tl.constexpr,  # more than num_experts
    chunk: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i places the pairs of chunk i."""
    own_chunk = tl.program_id(0)
    expert = tl.arange(0, block_experts)
    rows = tl.arange(0, _AT_ONCE)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([block_experts], tl.int32)
    before = tl.zeros([block_experts], tl.int32)
    for at in range(0, num_chunks, _AT_ONCE):
        in_bounds = (at + rows < num_chunks)[:, None] & (expert < num_experts)[None, :]
        tile = tl.load(counts + (at + rows)[:, None] * num_experts + expert[None, :], mask=in_bounds, other=0)
        total += tl.sum(tile, 0)
        before += tl.sum(tl.where((at + rows < own_chunk)[:, None], tile, 0), 0)
    begins = tl.cumsum(total, 0) - total
    tl.store(offsets + expert, begins, mask=(expert <= num_experts) & (own_chunk == 0))
    own_places = places + own_chunk * num_experts
    tl.store(own_places + expert, begins + before, mask=expert < num_experts)
    tl.debug_barrier()
    index = tl.arange(0, chunk)
    own = _load_experts(experts, own_chunk * chunk + index, num_pairs, first, num_experts)
    is_here = own < num_experts
    rank = tl.zeros([chunk, _AT_ONCE], tl.int32)
    for at in tl.static_range(0, chunk, _AT_ONCE):
        other = at + tl.arange(0, _AT_ONCE)
        found = _load_experts(experts, own_chunk * chunk + other, num_pairs, first, num_experts)
        rank += ((found[None, :] == own[:, None]) & (other[None, :] < index[:, None])).to(tl.int32)
    place = tl.load(own_places + own, mask=is_here, other=0) + tl.sum(rank, 1)
    tl.store(order + place, own_chunk * chunk + index, mask=is_here)


def sort_pairs(experts: torch.Tensor, num_experts: int, first: int = 0) -> SortedPairs:
    """experts: [num_tokens, k], int32 or int64, contiguous. Of experts `first` to `first` + num_experts."""
    num_pairs, pdl = experts.numel(), supports_pdl(experts.device)
    assert experts.is_contiguous(), "rows must be contiguous"
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    options = {"num_experts": num_experts, "pdl": pdl, **launch_options(pdl)}
    if num_pairs <= _MAX_SCANNED:
        block = max(16, min(_MAX_BLOCK, triton.next_power_of_2(num_pairs)))
        _sort_kernel[(num_experts,)](
            *(experts, order, offsets, num_pairs, first), block=block, num_warps=4 if block > 256 else 1, **options
        )
        return SortedPairs(order, offsets)
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    counts = torch.empty(2, num_chunks, num_experts, dtype=torch.int32, device=experts.device)
    options |= {"block_experts": triton.next_power_of_2(num_experts + 1), "chunk": _CHUNK, "num_warps": 4}
    _count_kernel[(num_chunks,)](experts, counts[0], num_pairs, first, **options)
    _place_kernel[(num_chunks,)](experts, *counts, order, offsets, num_pairs, first, num_chunks, **options)
    return SortedPairs(order, offsets)


def list_items(experts: torch.Tensor, num_experts: int, first: int, block_rows: int) -> WorkItems:
    """Of pairs as `sort_pairs` takes them, of few tokens, in tiles of block_rows."""
    num_pairs, pdl = experts.numel(), supports_pdl(experts.device)
    assert experts.is_contiguous(), "rows must be contiguous"
    num_items = max_items(num_pairs, num_experts, block_rows)
    pairs = torch.empty(num_items, block_rows, dtype=torch.int32, device=experts.device)
    items = WorkItems(pairs, torch.empty(num_items, 2, dtype=torch.int32, device=experts.device))
    block = max(32, triton.next_power_of_2(num_pairs))
    _items_kernel[(num_experts,)](
        *(experts, *items, num_pairs, first, num_items),
        num_experts=num_experts,
        block_experts=max(_MIN_BINS, triton.next_power_of_2(num_experts)),
        block=block,
        block_items=triton.next_power_of_2(num_items),
        block_rows=block_rows,
        pdl=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return items


def max_items(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most work items that any routing of num_pairs pairs has."""
    return min(num_pairs, num_pairs // block_rows + min(num_pairs, num_experts))


def sort_pairs_reference(experts: torch.Tensor, num_experts: int, first: int = 0) -> SortedPairs:
    """`sort_pairs` in plain torch; pairs with experts of other ranks are last in the order."""
    local = experts.reshape(-1).long() - first
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    found, order = local.sort(stable=True)
    offsets = torch.searchsorted(found, torch.arange(num_experts + 1, device=experts.device))
    return SortedPairs(order.int(), offsets.int())
