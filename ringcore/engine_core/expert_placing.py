"""A placement of experts on ranks by how many tokens each had: pure functions.

Method: replicas to the experts with the most tokens a replica, one after the other; then the replicas with the most
tokens first, each to the rank with the least ("longest processing time first", Graham 1969), as in DeepSeek's
"Expert Parallelism Load Balancer" within one host.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.protocol.expert_placement import ExpertPlacement

__all__ = ["balanced_placement"]


def balanced_placement(counts: Sequence[int], current: ExpertPlacement) -> ExpertPlacement:
    """Of as many slots as `current`, and of an imbalance that is lower; else `current` itself. Experts that stay on
    their rank stay in their slot. counts: [num_experts], tokens of each."""
    groups = _packed(counts, _num_replicas(counts, current), current)
    placed = _in_slots(groups, current)
    return placed if placed.imbalance(counts) < current.imbalance(counts) else current


def _num_replicas(counts: Sequence[int], current: ExpertPlacement) -> list[int]:
    """Of each expert: at most one a rank."""
    replicas = [1] * current.num_experts
    for _ in range(len(current.experts) - current.num_experts):
        left = (expert for expert, number in enumerate(replicas) if number < current.num_ranks)
        replicas[max(left, key=lambda expert: (counts[expert] / replicas[expert], -replicas[expert], -expert))] += 1
    return replicas


def _packed(counts: Sequence[int], replicas: Sequence[int], current: ExpertPlacement) -> list[list[int]]:
    """The experts of as many groups as there are ranks, each group of as many as a rank has slots, none twice."""
    groups: list[list[int]] = [[] for _ in range(current.num_ranks)]
    loads, size = [0.0] * current.num_ranks, current.slots_per_rank
    # Those with many replicas have few groups to choose from when the groups are full, so they come first among equals.
    order = sorted(range(len(replicas)), key=lambda expert: (-counts[expert] / replicas[expert], -replicas[expert]))
    for expert in order:
        for _ in range(replicas[expert]):
            free = [rank for rank, group in enumerate(groups) if len(group) < size]
            fitting = (
                (loads[one], expert not in current.of_rank(one), one) for one in free if expert not in groups[one]
            )
            rank = min(fitting, default=(0, False, None))[2]
            if rank is None:  # every group with room has it: one of another takes the room
                rank = _made_room(groups, loads, free[0], expert, counts, replicas)
            groups[rank].append(expert)
            loads[rank] += counts[expert] / replicas[expert]
    return groups


def _made_room(
    groups: list[list[int]],
    loads: list[float],
    free: int,
    expert: int,
    counts: Sequence[int],
    replicas: Sequence[int],
) -> int:
    """Moves the lightest expert that it can into group `free` out of one without `expert`; -> that group."""
    found = [
        (counts[other] / replicas[other], rank, other)
        for rank, group in enumerate(groups)
        if expert not in group
        for other in group
        if other not in groups[free]
    ]
    load, rank, other = min(found)
    groups[rank].remove(other)
    groups[free].append(other)
    loads[rank] -= load
    loads[free] += load
    return rank


def _in_slots(groups: list[list[int]], current: ExpertPlacement) -> ExpertPlacement:
    """Each group on the rank that has the most of it already."""
    ranks = range(current.num_ranks)
    pairs = [(len({*groups[group]} & {*current.of_rank(rank)}), group, rank) for group in ranks for rank in ranks]
    of_rank: dict[int, list[int]] = {}
    taken: set[int] = set()
    for _, group, rank in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if rank not in of_rank and group not in taken:
            of_rank[rank] = groups[group]
            taken.add(group)
    experts: list[int] = []
    for rank in ranks:
        new = sorted(expert for expert in of_rank[rank] if expert not in current.of_rank(rank))
        experts += [old if old in of_rank[rank] else new.pop(0) for old in _once(current.of_rank(rank))]
    return ExpertPlacement(tuple(experts), current.num_experts, current.num_ranks)


def _once(experts: Sequence[int]) -> list[int]:
    """Second replicas on one rank are no experts."""
    return [expert if expert not in experts[:slot] else -1 for slot, expert in enumerate(experts)]
