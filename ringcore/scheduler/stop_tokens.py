"""Detects stop tokens of running requests: one table lookup for all tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["StopTokens"]


class StopTokens:
    """How many running requests have each token of the vocabulary among their stop tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, dtype=np.int32)
        self._num = 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._counts[token_id] += 1
            self._num += 1

    def remove(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._counts[token_id] -= 1
            self._num -= 1

    def hits(self, token_ids: np.ndarray) -> np.ndarray | None:
        """The indices in `token_ids` [n] of tokens that are a stop token of any running request; None: no hit."""
        if not self._num:
            return None
        counts = self._counts.take(token_ids)
        return np.flatnonzero(counts) if np.count_nonzero(counts) else None

    def check(self, token_ids: Iterable[int]) -> None:
        counts = np.bincount(np.fromiter(token_ids, np.int64), minlength=len(self._counts))
        assert (counts == self._counts).all(), "stop tokens: a wrong count"
        assert counts.sum() == self._num
