"""A placement of experts on ranks by how many tokens each had: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from ringcore.protocol.expert_placement import ExpertPlacement

__all__ = ["balanced_placement"]

_EVEN = 1.02  # an imbalance that is not worth another change
_LEAST_GAIN = 1e-9  # of the largest load, of a change: rounding is less


def balanced_placement(counts: Sequence[int], current: ExpertPlacement) -> ExpertPlacement:
    """Of as many slots as `current`, and of an imbalance that is not higher. counts: [num_experts], tokens of each.

    A local search, since weights are moved for every slot that changes. In turn the rank with the highest load
    exchanges one of its experts with another rank; or a replica of one takes a slot of another rank, from an expert
    that has replicas or is moved aside. Of these it makes the change after which the ranks that it concerns have the
    lowest highest load, and ends where that is not lower than before. No rank has an expert twice.
    """
    search = _Search(np.array(counts, dtype=np.float64), current)
    for _ in current.experts:
        if not search.improve():
            break
    found, ranks = replace(current, experts=tuple(search.slots.tolist())), range(current.num_ranks)
    experts = [_in_old_slots(current.of_rank(rank), found.of_rank(rank)) for rank in ranks]
    placed = replace(current, experts=tuple(chain(*experts)))
    return placed if placed.imbalance(counts) <= current.imbalance(counts) else current


def _in_old_slots(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """The experts of a rank, those that it had in their slots."""
    others = iter(expert for expert in new if expert not in old)
    return tuple(expert if expert in new else next(others) for expert in old)


class _Search:
    """Invariant: `_replicas` and `_has` are those of `slots`."""

    def __init__(self, counts: np.ndarray, current: ExpertPlacement) -> None:
        self.slots = np.array(current.experts)
        self._counts, self._num_ranks, size = counts, current.num_ranks, current.slots_per_rank
        self._rank_of = np.arange(len(self.slots)) // size
        self._replicas = np.bincount(self.slots, minlength=current.num_experts)
        self._has = np.zeros((current.num_ranks, current.num_experts), dtype=bool)  # whether a rank has an expert
        self._has[self._rank_of, self.slots] = True

    def improve(self) -> bool:
        """Makes the best change of the rank with the highest load; False where none is better than nothing."""
        shares = self._counts / self._replicas
        loads = np.bincount(self._rank_of, shares[self.slots], self._num_ranks)
        hot = int(loads.argmax())
        if loads[hot] <= _EVEN * loads.mean():
            return False
        own, others = np.flatnonzero(self._rank_of == hot), np.flatnonzero(self._rank_of != hot)
        replicated = others[self._replicas[self.slots[others]] > 1]
        swapped = self._after_swaps(shares, loads, own, others)
        replaced = self._after_replicas(shares, loads, own, replicated)
        best = min(swapped.min(initial=np.inf), replaced.min(initial=np.inf))
        if not best < loads[hot] * (1 - _LEAST_GAIN):
            return self._move_aside(shares, loads, own)
        if swapped.min(initial=np.inf) == best:
            one, other = np.unravel_index(swapped.argmin(), swapped.shape)
            self._put([(own[one], self.slots[others[other]]), (others[other], self.slots[own[one]])])
        else:
            one, other = np.unravel_index(replaced.argmin(), replaced.shape)
            self._put([(replicated[other], self.slots[own[one]])])
        return True

    def _move_aside(self, shares: np.ndarray, loads: np.ndarray, own: np.ndarray) -> bool:
        """A replica of the expert in `own` with the most tokens takes the slot of another rank's expert with the least,
        which takes that of a replica elsewhere. False where all loads together, the highest first, are no lower."""
        lacking = [slot for slot in own if not self._has[:, self.slots[slot]].all()]
        if not lacking:
            return False
        expert = self.slots[max(lacking, key=lambda slot: (shares[self.slots[slot]], -slot))]
        rank = int(np.where(self._has[:, expert], np.inf, loads).argmin())
        there = np.flatnonzero(self._rank_of == rank)
        aside = int(there[shares[self.slots[there]].argmin()])
        moved = self.slots[aside]
        is_free = (self._replicas[self.slots] > 1) & (self.slots != expert) & ~self._has[self._rank_of, moved]
        best, changes = self._falling(self.slots), None
        for slot in np.flatnonzero(is_free & (self._rank_of != rank)).tolist():
            slots = self.slots.copy()
            slots[aside], slots[slot] = expert, moved
            if (after := self._falling(slots)) < best:
                best, changes = after, [(aside, expert), (slot, moved)]
        if changes is not None:
            self._put(changes)
        return changes is not None

    def _falling(self, slots: np.ndarray) -> list[float]:
        """The loads of the ranks, the highest first; so rounded that a change by rounding is none."""
        shares = self._counts / np.maximum(1, np.bincount(slots, minlength=len(self._counts)))
        loads = np.bincount(self._rank_of, shares[slots], self._num_ranks)
        found: list[float] = np.sort(np.round(loads / max(1.0, loads.sum()), 9))[::-1].tolist()
        return found

    def _after_swaps(self, shares: np.ndarray, loads: np.ndarray, own: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The highest load of both ranks after slots exchange their experts: [own, others]; infinite where a rank has
        the expert already."""
        here, there, ranks = self.slots[own], self.slots[others], self._rank_of[others]
        less = shares[here][:, None] - shares[there]
        after: np.ndarray = np.maximum(loads[self._rank_of[own[0]]] - less, loads[ranks] + less)
        after[self._has[:, here][ranks].T | self._has[self._rank_of[own[0]], there]] = np.inf
        return after

    def _after_replicas(
        self, shares: np.ndarray, loads: np.ndarray, own: np.ndarray, replicated: np.ndarray
    ) -> np.ndarray:
        """The highest load of the ranks concerned after a replica of an expert in `own` takes a slot of `replicated`,
        which holds one of several replicas: [own, replicated]; infinite where the rank has the expert already."""
        here, there, ranks = self.slots[own], self.slots[replicated], self._rank_of[replicated]
        share = self._counts[here] / (self._replicas[here] + 1)
        has_one, has_other = self._has[:, here].T[:, None], self._has[:, there].T[None]  # [own, replicated, rank]
        takes = (ranks[:, None] == np.arange(self._num_ranks))[None]
        more = self._counts[there] / np.maximum(1, self._replicas[there] - 1) - shares[there]
        after = loads + has_one * (share - shares[here])[:, None, None]
        after = after + np.where(takes, -shares[there][:, None], has_other * more[:, None])
        after = after + takes * share[:, None, None]
        highest: np.ndarray = np.where(has_one | has_other | takes, after, -np.inf).max(-1, initial=-np.inf)
        highest[self._has[:, here][ranks].T] = np.inf
        return highest

    def _put(self, changes: Sequence[tuple[int, int]]) -> None:
        """Experts into slots."""
        for slot, _ in changes:
            self._replicas[self.slots[slot]] -= 1
            self._has[self._rank_of[slot], self.slots[slot]] = False
        for slot, expert in changes:
            self.slots[slot] = expert
            self._replicas[expert] += 1
            self._has[self._rank_of[slot], expert] = True
