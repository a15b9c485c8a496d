"""Drafts that a test decides on."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from ringcore.protocol.codec import int_array
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.drafts.proposer import Drafts, Proposer
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.drafts.suffix_proposer import SuffixProposer

__all__ = ["FreeHead", "FreeSuffix", "ScriptedDrafts"]


class FreeSuffix(SuffixProposer):
    """To it a token costs nothing, so that every draft is verified."""

    def learn_costs(self, costs: StepCosts) -> None:
        self.costs = StepCosts((1, 2), (1.0, 1.0))


class FreeHead(HeadProposer):
    """Likewise."""

    def learn_costs(self, costs: StepCosts) -> None:
        super().learn_costs(StepCosts((1, 2), (1.0, 1.0)))


class ScriptedDrafts(Proposer):
    """`script`: a row's known tokens and the most drafts -> its drafts."""

    script: ClassVar[Callable[[list[int], int], list[int]]] = staticmethod(lambda tokens, most: [])

    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        found = [
            type(self).script(self.rows.token_ids[row, : self.rows.num_tokens[row]].tolist(), limit)[:limit]
            for row, limit in zip(rows.tolist(), most.tolist(), strict=True)
        ]
        return Drafts(np.array([len(one) for one in found]), int_array([token for one in found for token in one]))
