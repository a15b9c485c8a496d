"""Drafts of a text that is known, right with a given chance: what verifying them costs, and what they can bring."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringcore.config import EngineConfig
from ringcore.worker.drafts.drafts_behind import DraftsBehind
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.drafts.proposer import Drafts, Proposer
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["KNOWN_TOKEN", "KnownHead", "KnownText", "first_token"]

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
        return Drafts(most, _known(self.rows, rows, most))


class KnownHead(HeadProposer):
    """A head that computes its drafts and has known ones instead, as many as pay."""

    def __init__(self, config: EngineConfig, rows: RequestRows, runs: HeadRuns) -> None:
        known: Any = _KnownRuns(runs, rows)
        super().__init__(config, rows, known)

    def _is_worthwhile(self) -> bool:
        """Every request is followed, whatever became of the drafts of others."""
        return True


class _KnownRuns:
    def __init__(self, runs: HeadRuns, rows: RequestRows) -> None:
        self._runs, self._rows = runs, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        drafts = self._runs.draft(rows, starts, counts)
        return _known_as(drafts, self._rows, rows)

    def draft_behind(self, *step: Any, **how_many: Any) -> _KnownBehind | None:
        behind = self._runs.draft_behind(*step, **how_many)
        return None if behind is None else _KnownBehind(behind, self._rows)


class _KnownBehind:
    def __init__(self, behind: DraftsBehind, rows: RequestRows) -> None:
        self._rows, self._behind, self.num_drafts = rows, behind, behind.num_drafts

    def token_ids(self, rows: np.ndarray) -> np.ndarray:
        return _known_as(self._behind.token_ids(rows), self._rows, rows)


def _known_as(drafts: np.ndarray, rows: RequestRows, drafting: np.ndarray) -> np.ndarray:
    """In the place of drafts [n, num_drafts] of rows drafting [n]."""
    return _known(rows, drafting, np.full(len(drafting), drafts.shape[1])).reshape(drafts.shape)


def _known(rows: RequestRows, drafting: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """counts[i] tokens of row drafting[i], int32."""
    chances = np.repeat((rows.token_ids[drafting, 0] - _FIRST) / 100, counts)
    seed = int(rows.num_tokens[drafting].sum())  # the same on every rank
    is_right = np.random.default_rng(seed).random(len(chances)) < chances
    return np.where(is_right, KNOWN_TOKEN, _OTHER_TOKEN).astype(np.int32)
