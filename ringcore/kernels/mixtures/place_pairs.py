"""Experts to the slots of ranks that have them, on the device: which replica computes a pair, and how many tokens each
expert has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.mixtures.placed_pairs import PlacedPairs, SlotTables

__all__ = ["place_pairs"]

_BLOCK_PAIRS = 256


@triton.jit
def _or(left, right):
    return left | right


@triton.jit(do_not_specialize=["num_tokens"])
def _place_kernel(
    experts,  # [num_tokens, k] int32 or int64
    replicas,  # [num_experts, max_replicas] int32
    num_replicas,  # [num_experts] int32
    counts,  # [num_experts] int64, read where counts_tokens
    slots,  # [num_tokens, k] int32
    ranks,  # [num_tokens] int32
    num_tokens,
    k: tl.constexpr,
    block_k: tl.constexpr,
    block_tokens: tl.constexpr,
    max_replicas: tl.constexpr,
    slots_per_rank: tl.constexpr,
    counts_tokens: tl.constexpr,
    pdl: tl.constexpr,
):
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)[:, None]
    choice = tl.arange(0, block_k)[None, :]
    mask = (token < num_tokens) & (choice < k)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts + token * k + choice, mask=mask, other=0).to(tl.int32)
    number = tl.load(num_replicas + expert, mask=mask, other=1)
    slot = tl.load(replicas + expert * max_replicas + token % number, mask=mask, other=0)
    tl.store(slots + token * k + choice, slot, mask=mask)
    bits = tl.where(mask, 1 << (slot // slots_per_rank), 0)
    at = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    tl.store(ranks + at, tl.reduce(bits, 1, _or), mask=at < num_tokens)
    if counts_tokens:
        tl.atomic_add(counts + expert, tl.full(expert.shape, 1, tl.int64), mask=mask, sem="relaxed")


def place_pairs(experts: torch.Tensor, tables: SlotTables, slots_per_rank: int, counts: bool) -> PlacedPairs:
    """As `place_pairs_reference`. experts: contiguous."""
    num_tokens, k = experts.shape
    assert experts.is_contiguous(), "rows must be contiguous"
    slots = torch.empty(num_tokens, k, dtype=torch.int32, device=experts.device)
    ranks = torch.empty(num_tokens, dtype=torch.int32, device=experts.device)
    if not num_tokens:
        return PlacedPairs(slots, ranks)
    block_k, pdl = triton.next_power_of_2(k), supports_pdl(experts.device)
    block_tokens = max(1, _BLOCK_PAIRS // block_k)
    _place_kernel[(triton.cdiv(num_tokens, block_tokens),)](
        *(experts, tables.slots, tables.num_replicas, tables.counts, slots, ranks, num_tokens),
        k=k,
        block_k=block_k,
        block_tokens=block_tokens,
        max_replicas=tables.slots.shape[1],
        slots_per_rank=slots_per_rank,
        counts_tokens=counts,
        pdl=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return PlacedPairs(slots, ranks)
