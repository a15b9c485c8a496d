"""Which rank has which experts of a mixture: as both columns know it, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

__all__ = ["ExpertBalanceStats", "ExpertLoad", "ExpertPlacement"]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of one layer in slots, as many on each rank: rank r has the slots from r * `slots_per_rank` on. An
    expert in several slots has replicas, which divide its tokens.

    Invariant: every expert has a slot, and at most `max_replicas`.
    """

    experts: tuple[int, ...]  # of each slot
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.num_ranks == 0, self
        assert set(self.experts) == set(range(self.num_experts)), self

    @classmethod
    def initial(cls, num_experts: int, num_redundant: int, num_ranks: int) -> ExpertPlacement:
        """Successive experts on each rank, then replicas of those that follow, which the next rank has."""
        per_rank = (num_experts + num_redundant) // num_ranks
        assert num_experts <= per_rank * num_ranks, (num_experts, num_redundant, num_ranks)
        firsts = (rank * num_experts // num_ranks for rank in range(num_ranks))
        experts = tuple((first + slot) % num_experts for first in firsts for slot in range(per_rank))
        return cls(experts, num_experts, num_ranks)

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.num_ranks

    @property
    def max_replicas(self) -> int:
        return len(self.experts) - self.num_experts + 1

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """By slot."""
        return self.experts[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def slots(self) -> list[list[int]]:
        """Of each expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return found

    def rank_loads(self, counts: Sequence[int]) -> list[float]:
        """Pairs of a token and an expert that each rank computes, where counts [num_experts] were routed."""
        shares = [counts[expert] / len(slots) for expert, slots in enumerate(self.slots())]
        return [sum(shares[expert] for expert in self.of_rank(rank)) for rank in range(self.num_ranks)]

    def imbalance(self, counts: Sequence[int]) -> float:
        """The largest load of a rank in terms of the mean, from 1 on; 1 without tokens."""
        loads = self.rank_loads(counts)
        total = sum(loads)
        return max(loads) * self.num_ranks / total if total else 1.0


class ExpertLoad(msgspec.Struct, frozen=True):
    """Of one layer of a stage, since it was read before: tokens by expert, and where the experts are."""

    counts: list[int]
    experts: list[int]  # `ExpertPlacement.experts`


class ExpertBalanceStats(msgspec.Struct, frozen=True):
    """As of the last time that loads were read; counts are since the engine's start. The load of a rank is the pairs of
    a token and an expert that it computed of a layer."""

    mean_imbalance: float = 1.0  # over the layers: the largest load of a rank in terms of the mean
    max_imbalance: float = 1.0
    hottest_share: float = 0.0  # over the layers: the largest share of one expert of all pairs
    num_placements: int = 0  # of a layer's experts
    moved_bytes: int = 0  # of weights, of all ranks
