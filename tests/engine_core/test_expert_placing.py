"""Placements of experts by their tokens, by their properties."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from samples import num_examples

from ringcore.engine_core.expert_placing import balanced_placement
from ringcore.protocol.expert_placement import ExpertPlacement


@st.composite
def layers(draw: st.DrawFn) -> tuple[ExpertPlacement, list[list[int]]]:
    """An initial placement, and the tokens of its experts at several times."""
    num_ranks = draw(st.integers(1, 8))
    per_rank = draw(st.integers(1, 12))
    num_experts = draw(st.integers(per_rank, per_rank * num_ranks))
    of_expert = st.one_of(st.just(0), st.integers(0, 10), st.integers(0, 10**6))
    counts = st.lists(of_expert, min_size=num_experts, max_size=num_experts)
    placement = ExpertPlacement.initial(num_experts, per_rank * num_ranks - num_experts, num_ranks)
    return placement, draw(st.lists(counts, min_size=1, max_size=4))


@settings(deadline=None, max_examples=num_examples(60, 150))
@given(layers())
def test_every_expert_has_a_slot_and_no_load_is_higher(layer: tuple[ExpertPlacement, list[list[int]]]) -> None:
    """After each of several placements in a row."""
    current, times = layer
    for counts in times:
        placed = balanced_placement(counts, current)
        assert set(placed.experts) == set(range(placed.num_experts))
        assert len(placed.experts) == len(current.experts)
        for rank in range(placed.num_ranks):
            old, new = current.of_rank(rank), placed.of_rank(rank)
            assert len(set(new)) == placed.slots_per_rank, "twice on a rank"
            assert all(old.index(expert) == new.index(expert) for expert in new if expert in old), "moved for nothing"
        assert placed.imbalance(counts) <= current.imbalance(counts)
        assert placed == balanced_placement(list(counts), current)
        assert balanced_placement(counts, placed).imbalance(counts) <= placed.imbalance(counts)
        current = placed


@settings(deadline=None, max_examples=num_examples(25, 50))
@given(st.integers(2, 8), st.integers(1, 8), st.integers(0, 7))
def test_a_hot_expert_is_divided_over_the_ranks(num_ranks: int, per_rank: int, hot: int) -> None:
    num_experts = per_rank * num_ranks
    placement = ExpertPlacement.initial(num_experts, num_ranks, num_ranks)
    counts = [10] * num_experts
    counts[hot % num_experts] = 10_000
    placed = balanced_placement(counts, placement)
    assert len(placed.slots()[hot % num_experts]) == num_ranks
    assert placed.imbalance(counts) < 1.1
    assert placed.imbalance(counts) <= placement.imbalance(counts)


def test_two_hot_experts_of_a_rank_are_parted() -> None:
    placement = ExpertPlacement.initial(8, 0, 2)
    placed = balanced_placement([9, 9, 1, 1, 1, 1, 1, 1], placement)
    assert placed.rank_loads([9, 9, 1, 1, 1, 1, 1, 1]) == [12, 12]
    even = [5] * 8
    assert balanced_placement(even, placement) == placement


@pytest.mark.parametrize(("redundant", "experts"), [(0, (0, 1, 2, 3)), (2, (0, 1, 2, 2, 3, 0)), (4, (0, 1, 2, 3) * 2)])
def test_the_initial_placement(redundant: int, experts: tuple[int, ...]) -> None:
    if redundant == 4:
        experts = (0, 1, 2, 3, 2, 3, 0, 1)
    assert ExpertPlacement.initial(4, redundant, 2).experts == experts
