"""Experts to the slots of ranks that have them, as data and in plain torch: the reference of `place_pairs`."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["PlacedPairs", "SlotTables", "place_pairs_reference"]


class SlotTables(NamedTuple):
    """At fixed addresses, so that a CUDA graph sees new contents."""

    slots: torch.Tensor  # [num_experts, max_replicas] int32, of each expert; 0 behind its last one
    num_replicas: torch.Tensor  # [num_experts] int32
    counts: torch.Tensor  # [num_experts] int64: tokens of each since they were set to 0


class PlacedPairs(NamedTuple):
    slots: torch.Tensor  # [num_tokens, k] int32
    ranks: torch.Tensor  # [num_tokens] int32: bit r is set where rank r has a pair of the token


def place_pairs_reference(experts: torch.Tensor, tables: SlotTables, slots_per_rank: int, counts: bool) -> PlacedPairs:
    """The slots of pairs: token t takes replica t % n of each of its experts, which has n. experts: [num_tokens, k]
    int32 or int64. counts: whether they are counted."""
    chosen = experts.long()
    token = torch.arange(len(chosen), device=chosen.device)[:, None]
    slots = tables.slots[chosen, token % tables.num_replicas[chosen]]
    is_on = (slots // slots_per_rank)[:, :, None] == torch.arange(31, device=chosen.device)
    ranks = (is_on.any(1).int() << torch.arange(31, dtype=torch.int32, device=chosen.device)).sum(1, dtype=torch.int32)
    if counts:
        tables.counts.add_(torch.bincount(chosen.flatten(), minlength=len(tables.counts)))
    return PlacedPairs(slots, ranks)
