"""Drafts by suffix matching: what followed a row's last tokens where they stood before, in the row itself or in what
other requests of the engine wrote."""

from __future__ import annotations

import hashlib

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.draft_odds import DraftOdds
from ringcore.worker.drafts.ngram_index import NgramIndex, ngram_lengths
from ringcore.worker.drafts.proposer import Drafts, Proposer
from ringcore.worker.drafts.shared_texts import SharedTexts
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["SuffixProposer"]

_MAX_ENTRIES = 1 << 21  # of the rows' index, for each length of its n-grams
_CHUNK = 1 << 14  # tokens of a prompt that are indexed at once


class SuffixProposer(Proposer):
    """Every rank has the same rows, so it finds the same drafts without a message.

    How many of them a step verifies follows from how often such drafts were right lately and from what a step of more
    tokens costs: see `DraftOdds`.
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
        self.odds = DraftOdds(max_rows, speculation.num_drafts, lengths)
        self.costs = StepCosts()

    def admit(self, request: NewRequest) -> None:
        self._num_indexed[request.row] = 0
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

    def learn_costs(self, sizes: np.ndarray, seconds: np.ndarray) -> None:
        self.costs = StepCosts(sizes.tolist(), seconds.tolist())

    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        num_known = self.rows.num_tokens[rows]
        self.odds.observe(rows, self.rows.token_ids, num_known)
        token_ids, counts, lengths = self.find(rows)
        self.odds.predicted(rows, token_ids, counts, lengths, num_known)
        chosen = self.odds.choose(rows, np.minimum(counts, most), num_tokens, self.costs, self.margin)
        return Drafts(chosen, token_ids[np.arange(self._num_drafts) < chosen[:, None]].astype(np.int32))

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> tokens [n, num_drafts] that followed the last tokens of rows [n] where these stood last, of which counts
        [n] count, and how many tokens matched, [n]; a row's own text goes before that of others."""
        self._index(rows)
        begins = rows.astype(np.int64) * self.rows.token_ids.shape[1]
        ends = begins + self.rows.num_tokens[rows]
        windows = self._own.windows(ends, begins)
        hashes = self._own.hashes(windows)

        def bounds(found: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return begins[which], (found > begins[which]) & (found < ends[which])

        places, lengths = self._own.find(hashes, windows, begins, bounds)
        # A text that repeats itself goes on repeating: its period is the distance from the match to its end.
        period = np.maximum(ends - places, 1)
        steps = np.arange(self._num_drafts)
        token_ids = self._text[np.where(places < 0, 0, places)[:, None] + steps % period[:, None]]
        counts = np.where(places < 0, 0, self._num_drafts)
        if self._shared is None:
            return token_ids, counts, lengths
        others, other_lengths, other_counts = self._shared.find(hashes, windows, self._salts[rows], self._num_drafts)
        is_longer = other_lengths > lengths
        token_ids = np.where(is_longer[:, None], others, token_ids)
        return token_ids, np.where(is_longer, other_counts, counts), np.maximum(lengths, other_lengths)

    def _index(self, rows: np.ndarray) -> None:
        """Indexes the n-grams of rows [n] that have a token after them."""
        max_len = self.rows.token_ids.shape[1]
        first, past = self._num_indexed[rows], self.rows.num_tokens[rows]
        counts = past - first
        self._num_indexed[rows] = past
        starts = np.repeat(rows.astype(np.int64) * max_len, counts)
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = starts + np.repeat(first, counts) + offsets
        for begin in range(0, len(ends), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            windows = self._own.windows(ends[chunk], starts[chunk])
            self._own.add(ends[chunk], self._own.hashes(windows), starts[chunk])


def _salt_number(salt: str | None) -> int:
    """63 bits: what two salts wrote is as private as two salts are different to a 63-bit digest; 0 of no salt."""
    if salt is None:
        return 0
    digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1
