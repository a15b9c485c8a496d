"""Who proposes drafts for the rows of a step, and how the rows take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.drafts_behind import VerifiedPlaces
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.rows.drafts import Drafts
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["Drafts", "Proposer", "Room", "draft", "room_for_drafts"]


class Proposer(ABC):
    """Drafts for the rows of one rank. Every rank calls its own alike and must get the same drafts: they may follow
    from the rows' tokens and from what all ranks were told, never from a clock of this rank.

    margin: how many times the tokens a second of a step without drafts the next one must promise, as the engine says;
    infinite: it must have none.
    """

    margin = 1.0

    def __init__(self, config: EngineConfig, rows: RequestRows) -> None:
        """config: with `speculative`."""
        self.config, self.rows = config, rows

    def admit(self, request: NewRequest) -> None:  # noqa: B027  most keep nothing of a row
        """`rows` has just admitted the request."""

    def clear(self, rows: np.ndarray) -> None:  # noqa: B027
        """The requests of rows [n] have ended, or were preempted; their token ids are still in `rows.token_ids`."""

    def learn_costs(self, costs: StepCosts) -> None:  # noqa: B027
        """What steps take, the same on every rank."""

    def time_drafts(self, num_rows: int) -> int:
        """Does what some more drafts of num_rows rows take before a step, while there are no rows; -> how many; 0: they
        take nothing."""
        return 0

    def take(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray | None) -> None:  # noqa: B027
        """The model has computed, or will before anything that is launched now, counts[i] tokens of row rows[i] from
        position starts[i] on; None: one each. Drafts among them may be wrong."""

    def verified_in(self, places: VerifiedPlaces) -> None:  # noqa: B027
        """Drafts are verified by steps that leave this on the device. Called once, before the first step."""

    def take_verified(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """`take`, of a step with drafts, see `verified_in`; row i has counts[i] places, row after row. It is followed
        before another step is launched."""
        self.take(rows, starts, counts)

    def follow(self, rows: np.ndarray, num_known: np.ndarray) -> None:  # noqa: B027
        """Of rows [n], which have gained tokens, the first num_known [n] tokens are known now. The last call before
        `propose` is of all rows with all their tokens."""

    def may_propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> bool:
        """Whether `propose` would be worth waiting for the last token of rows [n], which the device still computes."""
        return self.margin < np.inf

    @abstractmethod
    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        """Drafts after the last token of rows [n], which decode and whose tokens are all known; at most most[i] >= 0 of
        row i. num_tokens: known tokens of the whole step."""


class Room(NamedTuple):
    """Which rows of a step may have drafts."""

    places: np.ndarray  # [m] int64: of these rows among the step's
    rows: np.ndarray  # [m] int32
    most: np.ndarray  # [m] int64: the most drafts of each
    num_tokens: int  # known tokens of the whole step


def room_for_drafts(
    most_positions: int,
    rows: RequestRows,
    scheduled: np.ndarray,
    counts: np.ndarray | None,
    max_gained: np.ndarray | None,
) -> Room | None:
    """Of rows scheduled [n]; None: none may have any.

    A row has none before its first generated token: its last known token may be the rest of a prompt, from which a
    request takes more than a token. All rows together have no more than the memory budget has logits for, the first
    ones served first.
    """
    room = most_positions - len(scheduled)
    if max_gained is None or room <= 0:
        return None
    places = np.flatnonzero((max_gained > 1) & (rows.num_tokens[scheduled] > rows.num_prompt_tokens[scheduled]))
    if not len(places):
        return None
    most = max_gained[places].astype(np.int64) - 1
    most = np.clip(room - (np.cumsum(most) - most), 0, most)
    return Room(places, scheduled[places], most, len(scheduled) if counts is None else int(counts.sum()))


def draft(proposer: Proposer, rows: RequestRows, scheduled: np.ndarray, room: Room) -> Drafts | None:
    """Writes drafts after the last tokens of rows scheduled [n] -> those of each; None: none has any."""
    proposed = proposer.propose(room.rows, room.most, room.num_tokens)
    if not len(proposed.token_ids):
        return None
    spans = RowSpans(1, proposed.counts)
    places = spans.repeat(rows.num_tokens[room.rows]) + spans.offsets(len(room.rows))
    rows.token_ids[spans.repeat(room.rows), places] = proposed.token_ids
    found = np.zeros(len(scheduled), dtype=np.int64)
    found[room.places] = proposed.counts
    return Drafts(found, proposed.token_ids)
