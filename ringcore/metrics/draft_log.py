"""Counts of speculative decoding."""

from __future__ import annotations

import msgspec
import numpy as np

from ringcore.protocol.steps import ModelRunnerOutput

__all__ = ["DraftLog", "DraftStats"]


class DraftStats(msgspec.Struct, frozen=True):
    """Since the log began."""

    num_drafts: int  # rows with drafts, each step counted
    num_draft_tokens: int  # drafts that the model verified
    accepted_at: list[int]  # accepted drafts by their place after a row's last token

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_at)


class DraftLog:
    """Counts the drafts of steps."""

    def __init__(self, max_drafts: int) -> None:
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted_at = np.zeros(max_drafts, dtype=np.int64)

    def count(self, output: ModelRunnerOutput) -> None:
        if output.num_drafts is None:
            return
        self._num_drafts += int(np.count_nonzero(output.num_drafts))
        self._num_draft_tokens += int(output.num_drafts.sum())
        if output.num_gained is not None:
            accepted = output.num_gained[:, None] - 1 > np.arange(len(self._accepted_at))
            self._accepted_at += accepted.sum(axis=0)

    def stats(self) -> DraftStats | None:
        """None without speculative decoding."""
        if not len(self._accepted_at):
            return None
        return DraftStats(self._num_drafts, self._num_draft_tokens, self._accepted_at.tolist())
