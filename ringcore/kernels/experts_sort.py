"""Tokens sorted by expert, on the device: which pairs of a token and an expert each expert has."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["SortedPairs", "sort_pairs", "sort_pairs_reference"]

_MAX_BLOCK = 2048


class SortedPairs(NamedTuple):
    """Pairs by expert, those of one expert by token; pairs with experts of other ranks are left out."""

    order: torch.Tensor  # [num_pairs] int32, pairs; undefined from offsets[-1] on
    offsets: torch.Tensor  # [num_experts + 1] int32: where the pairs of each expert begin


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


def sort_pairs(experts: torch.Tensor, num_experts: int, first: int = 0) -> SortedPairs:
    """experts: [num_tokens, k], int32 or int64, contiguous. Of experts `first` to `first` + num_experts.

    A counting sort in one launch, stable, without atomics: nothing depends on the order in which programs run, and
    nothing is asked for on the host.
    """
    num_pairs = experts.numel()
    assert experts.is_contiguous(), "rows must be contiguous"
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    pdl = supports_pdl(experts.device)
    block = max(16, min(_MAX_BLOCK, triton.next_power_of_2(num_pairs)))
    _sort_kernel[(num_experts,)](
        experts,
        order,
        offsets,
        num_pairs,
        first,
        num_experts=num_experts,
        block=block,
        pdl=pdl,
        num_warps=4 if block > 256 else 1,
        **launch_options(pdl),
    )
    return SortedPairs(order, offsets)


def sort_pairs_reference(experts: torch.Tensor, num_experts: int, first: int = 0) -> SortedPairs:
    """`sort_pairs` in plain torch; pairs with experts of other ranks are last in the order."""
    local = experts.reshape(-1).long() - first
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    found, order = local.sort(stable=True)
    offsets = torch.searchsorted(found, torch.arange(num_experts + 1, device=experts.device))
    return SortedPairs(order.int(), offsets.int())
