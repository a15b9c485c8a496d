"""The experts of one layer in slots of the ranks: which pairs are whose, how many tokens each expert has, and their
weights moved from rank to rank.

The kernels of a layer see slots alone: those of this rank follow `first`, whatever expert is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.mixtures.placed_pairs import PlacedPairs, SlotTables, place_pairs_reference
from ringcore.model_executor import ops
from ringcore.model_executor.weight import Arrangement
from ringcore.protocol.expert_placement import ExpertPlacement

__all__ = ["ExpertSlots", "SlotTensor"]

_PIECE_BYTES = 32 << 20  # of all experts of a tensor that are moved at a time


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A bound tensor of a rank's experts: contiguous, an equal part for each slot."""

    tensor: torch.Tensor
    arrangement: Arrangement | None = None

    def bytes_by_slot(self, num_slots: int) -> torch.Tensor:
        """[num_slots, bytes of one], of the same memory."""
        return self.tensor.view(torch.uint8).view(num_slots, -1)


class ExpertSlots:
    def __init__(self, num_experts: int, tp: TensorParallel, num_redundant: int | None = None) -> None:
        """num_redundant: slots beyond one for each expert; None: the placement does not change, and no tokens are
        counted."""
        self._tp, self.is_balanced = tp, num_redundant is not None
        self.placement = ExpertPlacement.initial(num_experts, num_redundant or 0, tp.size)

    @property
    def own(self) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        return self.placement.of_rank(self._tp.rank)

    @property
    def first(self) -> int:
        """This rank's first slot."""
        return self._tp.rank * self.placement.slots_per_rank

    def bind(self, device: torch.device, tensors: Sequence[SlotTensor], moved: Callable[[], None]) -> None:
        """tensors: of this rank's experts; moved: called when they have others."""
        self._place, self._tensors, self._moved = place_pairs_reference, tensors, moved
        if ops.has_kernels(device):
            from ringcore.kernels.mixtures.place_pairs import place_pairs

            self._place = place_pairs
        num_experts, replicas = self.placement.num_experts, self.placement.max_replicas
        self._tables = SlotTables(
            torch.zeros(num_experts, replicas, dtype=torch.int32, device=device),
            torch.zeros(num_experts, dtype=torch.int32, device=device),
            torch.zeros(num_experts, dtype=torch.int64, device=device),
        )
        self._fill_tables()

    def placed(self, experts: torch.Tensor) -> PlacedPairs:
        """experts: [num_tokens, k]. Counts the tokens where the placement may change."""
        return self._place(experts.contiguous(), self._tables, self.placement.slots_per_rank, self.is_balanced)

    def take_counts(self) -> list[int]:
        """Tokens of each expert since the call before, of which all ranks have the same. Waits for the device."""
        counts: list[int] = self._tables.counts.tolist()
        self._tables.counts.zero_()
        return counts

    def move(self, placement: ExpertPlacement) -> int:
        """Places the experts anew, between two steps, all ranks together; -> the bytes that this rank wrote.

        What a slot gets comes from the first rank that has the expert. All tensors keep their addresses."""
        if placement == self.placement:
            return 0
        num_bytes = 0
        for one in self._tensors:
            arrangement = one.arrangement
            if arrangement is not None and not arrangement.is_used_on(one.tensor.device):
                arrangement = None
            if arrangement is not None:
                arrangement.restore(one.tensor)
            num_bytes += self._move(one.bytes_by_slot(placement.slots_per_rank), placement)
            if arrangement is not None:
                arrangement.arrange(one.tensor)
        self.placement = placement
        self._fill_tables()
        self._moved()
        return num_bytes

    def _move(self, own: torch.Tensor, placement: ExpertPlacement) -> int:
        """own: [slots_per_rank, bytes]. Piece by piece of all moved experts, read before a slot is written."""
        old, rank = self.placement, self._tp.rank
        targets = [(slot, expert) for slot, expert in enumerate(placement.experts) if old.experts[slot] != expert]
        moved = sorted({expert for _, expert in targets})
        here: dict[int, list[int]] = {expert: [] for expert in moved}
        for slot, expert in targets:
            if slot // placement.slots_per_rank == rank:
                here[expert].append(slot % placement.slots_per_rank)
        step = min(own.shape[1], max(1, _PIECE_BYTES // len(moved)))
        staging = own.new_empty(len(moved), step)
        for begin in range(0, own.shape[1], step):
            piece = own[:, begin : begin + step]
            read = [rows[: piece.shape[1]] for rows in staging]
            for expert, rows in zip(moved, read, strict=True):
                source, slot = divmod(old.experts.index(expert), old.slots_per_rank)
                if source == rank:
                    rows.copy_(piece[slot])
                self._tp.broadcast(rows, source)
            for expert, rows in zip(moved, read, strict=True):
                for target in here[expert]:
                    piece[target].copy_(rows)
        return sum(map(len, here.values())) * own.shape[1]

    def _fill_tables(self) -> None:
        slots = self.placement.slots()
        rows = [of_one + [0] * (self.placement.max_replicas - len(of_one)) for of_one in slots]
        self._tables.slots.copy_(torch.tensor(rows, dtype=torch.int32))
        self._tables.num_replicas.copy_(torch.tensor([len(of_one) for of_one in slots], dtype=torch.int32))
