"""Who proposes drafts for the rows of a step, and how the rows take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import NewRequest
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["Drafts", "Proposer", "draft"]


class Drafts(NamedTuple):
    """Of n rows."""

    counts: np.ndarray  # [n] int64: drafts of each, at least 0
    token_ids: np.ndarray  # [sum of counts] int32: row-major


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

    def learn_costs(self, sizes: np.ndarray, seconds: np.ndarray) -> None:  # noqa: B027
        """What steps of sizes [n] tokens took, ascending from 1, in seconds [n]: the same on every rank."""

    @abstractmethod
    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        """Drafts after the last token of rows [n], which decode and whose tokens are all known; at most most[i] >= 0 of
        row i. num_tokens: known tokens of the whole step."""


def draft(
    proposer: Proposer | None,
    rows: RequestRows,
    scheduled: np.ndarray,
    counts: np.ndarray | None,
    max_gained: np.ndarray | None,
) -> np.ndarray | None:
    """Writes drafts after the last tokens of `scheduled` [n] -> how many each has, [n] int64; None: none has any.

    A row has none before its first generated token: its last known token may be the rest of a prompt, from which a
    request takes more than a token. All rows together have no more than the memory budget has logits for, the first
    ones served first.
    """
    if proposer is None or max_gained is None:
        return None
    drafting = np.flatnonzero((max_gained > 1) & (rows.num_tokens[scheduled] > rows.num_prompt_tokens[scheduled]))
    if not len(drafting):
        return None
    chosen = scheduled[drafting]
    num_tokens = len(scheduled) if counts is None else int(counts.sum())
    most = max_gained[drafting].astype(np.int64) - 1
    room = proposer.config.scheduler.max_sampled_positions - len(scheduled)
    most = np.clip(room - (np.cumsum(most) - most), 0, most)
    drafts = proposer.propose(chosen, most, num_tokens)
    if not len(drafts.token_ids):
        return None
    spans = RowSpans(1, drafts.counts)
    places = spans.repeat(rows.num_tokens[chosen]) + spans.offsets(len(chosen))
    rows.token_ids[spans.repeat(chosen), places] = drafts.token_ids
    found = np.zeros(len(scheduled), dtype=np.int64)
    found[drafting] = drafts.counts
    return found
