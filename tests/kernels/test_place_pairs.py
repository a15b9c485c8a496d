"""Experts to slots: the kernel against plain torch."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.mixtures.place_pairs import place_pairs
from ringcore.kernels.mixtures.placed_pairs import SlotTables, place_pairs_reference


@pytest.mark.parametrize(("num_tokens", "k", "dtype"), [(0, 2, torch.int64), (1, 1, torch.int64), (70, 6, torch.int32)])
@pytest.mark.parametrize("counts", [False, True])
def test_the_slots_ranks_and_counts_of_pairs(device, num_tokens, k, dtype, counts):
    """Of 7 experts with 1 to 3 replicas in 12 slots of 3 ranks."""
    generator = torch.Generator().manual_seed(num_tokens)
    number = torch.tensor([1, 3, 2, 1, 1, 2, 2], dtype=torch.int32)
    slots = torch.randint(0, 12, (7, 6), generator=generator, dtype=torch.int32)
    tables = SlotTables(slots, number, torch.arange(7))
    on_device = SlotTables(*(one.to(device).clone() for one in tables))
    experts = torch.rand(num_tokens, 7, generator=generator).topk(k).indices.to(dtype)
    expected = place_pairs_reference(experts, tables, 4, counts)
    placed = place_pairs(experts.to(device), on_device, 4, counts)
    assert torch.equal(placed.slots.cpu(), expected.slots)
    assert torch.equal(placed.ranks.cpu(), expected.ranks)
    assert torch.equal(on_device.counts.cpu(), tables.counts)
    assert bool((tables.counts != torch.arange(7)).any()) == (counts and num_tokens > 0)
