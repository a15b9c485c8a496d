"""Drafts of a text that is known, right with a given chance: what verifying them costs, and what they can bring."""

from __future__ import annotations

import numpy as np

from ringcore.worker.drafts.proposer import Drafts, Proposer

__all__ = ["KNOWN_TOKEN", "KnownText", "first_token"]

KNOWN_TOKEN, _OTHER_TOKEN = 7, 8
_FIRST = 100  # the first token of a prompt is so much more than the chance in percent


def first_token(chance: float) -> int:
    """Of the prompt of a request whose drafts are right with this chance."""
    return _FIRST + round(100 * chance)


class KnownText(Proposer):
    """Every request writes `KNOWN_TOKEN` alone. As many drafts as there may be, whatever they cost."""

    def may_propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> bool:
        return self.margin < np.inf and bool((self.rows.token_ids[rows, 0] >= _FIRST).any())

    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        if not self.may_propose(rows, most, num_tokens):
            return Drafts(np.zeros(len(rows), dtype=np.int64), np.zeros(0, dtype=np.int32))
        chances = np.repeat((self.rows.token_ids[rows, 0] - _FIRST) / 100, most)
        seed = int(self.rows.num_tokens[rows].sum())  # the same on every rank
        is_right = np.random.default_rng(seed).random(int(most.sum())) < chances
        return Drafts(most, np.where(is_right, KNOWN_TOKEN, _OTHER_TOKEN).astype(np.int32))
