"""Drafts by suffix matching: what followed a row's last tokens where they stood before, in the row itself or in what
other requests of the engine wrote."""

from __future__ import annotations

import hashlib

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.draft_odds import DraftOdds
from ringcore.worker.drafts.ngram_index import NgramIndex, Queries, ngram_lengths
from ringcore.worker.drafts.proposer import Drafts, Proposer
from ringcore.worker.drafts.shared_texts import SharedTexts
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["SuffixProposer"]

_MAX_ENTRIES = 1 << 21  # of the rows' index, for each length of its n-grams
_PATIENCE = 8  # lookups without a draft, after which a row is idle
_IDLE_EVERY = 16  # steps: then idle rows are looked up too


class SuffixProposer(Proposer):
    """Every rank has the same rows, so it finds the same drafts without a message.

    How many of them a step verifies follows from how often such drafts were right lately and from what a step of more
    tokens costs: see `DraftOdds`. A row that had no drafts for some lookups is idle: it is looked up in few steps, all
    idle rows in the same ones, until it has drafts again.
    """

    def __init__(self, config: EngineConfig, rows: RequestRows) -> None:
        super().__init__(config, rows)
        speculation = config.scheduler.speculation
        assert speculation is not None, "speculative is None"
        self._num_drafts = speculation.num_drafts
        max_rows, max_len = rows.token_ids.shape
        lengths = ngram_lengths(speculation.min_match)
        self._text = rows.token_ids.reshape(-1)  # a view: the token at position p of row r is at r * max_len + p
        self._own = NgramIndex(self._text, lengths, min(max_rows * max_len, _MAX_ENTRIES))
        self._shared = SharedTexts(speculation.shared_tokens, lengths) if speculation.shared_tokens else None
        self._num_indexed = np.zeros(max_rows, dtype=np.int64)  # n-grams of a row that end before this position
        self._salts = np.zeros(max_rows, dtype=np.int64)
        self._num_idle = np.zeros(max_rows, dtype=np.int64)  # lookups of a row since it had drafts
        self._num_followed = 0  # calls of `follow`
        self.odds = DraftOdds(max_rows, speculation.num_drafts, lengths)
        self.costs = StepCosts()

    def admit(self, request: NewRequest) -> None:
        self._num_indexed[request.row] = self._num_idle[request.row] = 0
        self._salts[request.row] = _salt_number(request.cache_salt)
        self.odds.admit(request.row)

    def clear(self, rows: np.ndarray) -> None:
        if self._shared is None:
            return
        for row in rows.tolist():
            begin, end = int(self.rows.num_prompt_tokens[row]), int(self._num_indexed[row])
            if end > begin:
                context = max(0, begin - self._shared.max_context)  # so that its first tokens have n-grams
                self._shared.add(self.rows.token_ids[row, context:end], begin - context, int(self._salts[row]))
            self._num_indexed[row] = 0

    def learn_costs(self, costs: StepCosts) -> None:
        self.costs = costs

    def follow(self, rows: np.ndarray, num_known: np.ndarray) -> None:
        self._num_followed += 1
        if self._num_followed % _IDLE_EVERY:
            is_due = self._num_idle[rows] < _PATIENCE
            if not is_due.all():
                rows, num_known = rows[is_due], num_known[is_due]
        if not len(rows):
            return
        self.odds.observe(rows, self.rows.token_ids, num_known)
        self.odds.predicted(rows, *self.find(rows, num_known), num_known)
        self._num_idle[rows] += 1

    def may_propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> bool:
        return bool(self._choose(rows, most, num_tokens, num_unknown=1).any())

    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        chosen = self._choose(rows, most, num_tokens, num_unknown=0)
        self._num_idle[rows[chosen > 0]] = 0
        return Drafts(chosen, self.odds.token_ids[rows][self.odds.places < chosen[:, None]])

    def _choose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int, num_unknown: int) -> np.ndarray:
        """num_unknown: of a row's last tokens, how many the last lookup need not have known."""
        is_current = self.odds.num_known[rows] >= self.rows.num_tokens[rows] - num_unknown
        limits = np.where(is_current, np.minimum(self.odds.counts[rows], most), 0)
        return self.odds.choose(rows, limits, num_tokens, self.costs, self.margin)

    def find(self, rows: np.ndarray, num_known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> tokens [n, num_drafts] that followed the first num_known [n] tokens of rows [n] where the last of these
        stood last, of which counts [n] count, and how many tokens matched, [n]; a row's own text goes before that of
        others."""
        begins = rows.astype(np.int64) * self.rows.token_ids.shape[1]
        ends = begins + num_known
        self._own.add(begins, begins + self._num_indexed[rows], ends, begins)  # those that have a token after them
        self._num_indexed[rows] = num_known
        places, lengths = self._own.find(Queries(self._text, begins, ends, begins))
        # A text that repeats itself goes on repeating: its period is the distance from the match to its end.
        period = np.maximum(ends - places, 1)
        token_ids = self._text[np.maximum(places, 0)[:, None] + self.odds.places % period[:, None]]
        counts = np.where(places < 0, 0, self._num_drafts)
        if self._shared is None:
            return token_ids, counts, lengths
        queries = Queries(self._text, begins, ends, self._salts[rows])
        others, other_lengths, other_counts = self._shared.find(queries, self._num_drafts)
        is_longer = other_lengths > lengths
        token_ids = np.where(is_longer[:, None], others, token_ids)
        return token_ids, np.where(is_longer, other_counts, counts), np.maximum(lengths, other_lengths)


def _salt_number(salt: str | None) -> int:
    """63 bits: what two salts wrote is as private as two salts are different to a 63-bit digest; 0 of no salt."""
    if salt is None:
        return 0
    digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1
