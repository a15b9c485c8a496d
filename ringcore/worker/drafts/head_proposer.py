"""Drafts of a head that was trained for the model (EAGLE-3, MTP)."""

from __future__ import annotations

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.steps import NewRequest
from ringcore.worker.drafts.draft_odds import DraftOdds
from ringcore.worker.drafts.drafts_behind import DraftsBehind, VerifiedPlaces
from ringcore.worker.drafts.head_features import MOST_PENDING, HeadFeatures
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.drafts.proposer import Drafts, Proposer
from ringcore.worker.drafts.step_costs import StepCosts
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN, RequestRows

__all__ = ["HeadProposer"]

_AT_FIRST = (0.7,)  # the odds of a draft, before any was seen
_MARGIN = 1.15  # of a new request, before the engine has asked for one
_TRIED_EVERY = 16  # requests: then one has drafts though those of others do not pay
_CHUNK = 32  # tokens of a row in a step: its features are not kept longer
_TRIED_DRAFTS, _MOST_TRIED = 4, 4  # of a row that is tried again, while there are so few rows
_REST, _LONGEST_REST = 32, 512  # tokens without drafts, after which it is
_TRIAL_COST = 0.005  # of the steps meanwhile, at most


class HeadProposer(Proposer):
    """The head computes each token that the model has computed, at the latest before it drafts after it: the features
    of steps without drafts are kept until then, so that they cost one run of the head for many steps.

    A request is followed from its first token or not at all; while drafts do not pay, few of them are. A row that has
    had no drafts for some tokens is tried again, without verifying them, more and more seldom; with many rows it is
    given up.

    Where a device verifies drafts, and the head runs by graphs, it drafts behind such a step for the next one: as many
    as would have been worthwhile in this one. Each row's last step tells whether its drafts are there.
    """

    def __init__(self, config: EngineConfig, rows: RequestRows, runs: HeadRuns) -> None:
        super().__init__(config, rows)
        speculation = config.scheduler.speculation
        assert speculation is not None, "speculative is None"
        max_rows, max_len = rows.token_ids.shape
        self._num_drafts, self._runs = speculation.num_drafts, runs
        self._features = HeadFeatures(max_rows, max_len)
        self._num_admitted = 0
        self._asked = _MARGIN  # the last margin of a step that might have drafts
        self._drafted_at = np.zeros(max_rows, dtype=np.int64)  # tokens of each row when it was last drafted for
        self._rests, self._least_rest = np.full(max_rows, _REST), _REST  # how long each is not drafted for at most
        self._is_tried = np.zeros(max_rows, dtype=bool)  # what is predicted is not verified
        self._behind: DraftsBehind | None = None  # the last step with drafts; of rows that took no other since
        self._is_behind = np.zeros(max_rows, dtype=bool)
        self._num_behind = 1  # the most drafts that a row was to have in the last step
        self.odds = DraftOdds(max_rows, speculation.num_drafts, (1,), _AT_FIRST)
        self.costs = StepCosts()

    # ---------------------------------------------------------------------------------------------------------------
    # Following rows.

    def admit(self, request: NewRequest) -> None:
        self.odds.admit(request.row)
        is_followed = self._num_admitted % _TRIED_EVERY == 0 or self._is_worthwhile()
        self._num_admitted += 1
        self._features.admit(request.row, request.num_computed_tokens, is_followed)
        self._drafted_at[request.row], self._is_tried[request.row] = len(request.token_ids), False
        self._rests[request.row] = self._least_rest

    def clear(self, rows: np.ndarray) -> None:
        self._features.is_followed[rows] = self._is_behind[rows] = False

    def learn_costs(self, costs: StepCosts) -> None:
        self.costs, self._num_admitted = costs, 0
        rest = int(_TRIED_DRAFTS * costs.of_draft(1) / _TRIAL_COST)
        self._least_rest = min(max(_REST, rest), _LONGEST_REST)

    def time_drafts(self, num_rows: int) -> int:
        return self._runs.run_padding(num_rows)

    def verified_in(self, places: VerifiedPlaces) -> None:
        self._runs.verified_in(places)

    def take(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray | None) -> None:
        num_tokens = len(rows) if counts is None else int(counts.sum())
        is_chunk = counts is not None and int(counts.max()) > _CHUNK
        self._is_behind[rows] = False
        self._leave_rested(rows)
        tapped = self._runs.head.tapped[:num_tokens]
        self._features.add(rows, starts, counts, self.rows.num_admissions[rows], tapped, must_copy=not is_chunk)
        if is_chunk or self._features.num_pending > MOST_PENDING:
            self._compute()

    def take_verified(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """The head computes all places of the step behind it, and drafts, unless it lags behind in one of its rows."""
        self._is_behind[:] = False
        self._leave_rested(rows)
        followed, behind = np.flatnonzero(self._features.is_followed[rows]), None
        ours = rows[followed]
        if len(ours) and bool((self._features.begins[ours] == starts[followed]).all()):
            firsts = (np.cumsum(counts) - counts)[followed]
            behind = self._runs.draft_behind(ours, firsts, counts[followed], int(counts.sum()), self._num_behind)
        if behind is None:
            self.take(rows, starts, counts)
        else:
            self._behind, self._is_behind[ours] = behind, True

    def _leave_rested(self, rows: np.ndarray) -> None:
        """Those of rows [n] that may have no drafts."""
        num_rested = self.rows.num_tokens[rows] - self._drafted_at[rows]
        self._features.is_followed[rows[num_rested > self._rests[rows] + _REST]] = False

    def _compute(self) -> None:
        """All tokens whose next one is known."""
        due = self._features.take(self._num_known(), self.rows.num_admissions)
        if due is not None:
            self._runs.compute(due)

    def _num_known(self) -> np.ndarray:
        """[max_rows]: of each row the tokens that the host has."""
        known = self.rows.num_tokens.copy()
        going = np.flatnonzero(known)
        while len(going):
            going = going[self.rows.token_ids[going, known[going] - 1] == UNKNOWN_TOKEN]
            known[going] -= 1
        return known

    def follow(self, rows: np.ndarray, num_known: np.ndarray) -> None:
        """What was predicted tells once: of drafts when their step is over, else when all the tokens are known."""
        behind = self._is_behind[rows]
        self._features.begins[rows[behind]] = num_known[behind] - 1
        needed = np.where(self._is_tried[rows], self.odds.counts[rows], 1)
        is_telling = num_known - self.odds.num_known[rows] >= needed
        rows, num_known = rows[is_telling], num_known[is_telling]
        self.odds.observe(rows, self.rows.token_ids, num_known)
        self.odds.counts[rows], self._is_tried[rows] = 0, False

    # ---------------------------------------------------------------------------------------------------------------
    # Drafts.

    def may_propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> bool:
        return bool(self._choose(rows, most, num_tokens).any() or self._is_due(rows, most).any())

    def propose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> Drafts:
        chosen = self._choose(rows, most, num_tokens)
        is_tried = self._is_due(rows, most) & (chosen == 0)
        if is_tried.any() and self._are_many:
            self._features.is_followed[rows[is_tried]] = False
            is_tried[:] = False
        wanted = np.where(is_tried, np.minimum(most, _TRIED_DRAFTS), chosen)
        if wanted.any():
            self._compute()
            is_ready = self._features.is_followed[rows]
            is_ready &= self._features.begins[rows] == self.rows.num_tokens[rows] - 1
            wanted, chosen = np.where(is_ready, wanted, 0), np.where(is_ready, chosen, 0)
            self._num_behind = max(1, int(chosen.max()))
            wanted = self._limited(rows, wanted)
            chosen = np.minimum(chosen, wanted)
        token_ids = self._draft(rows, wanted)
        tried = rows[is_tried & (wanted > 0)]
        self._rests[rows[chosen > 0]] = self._least_rest
        self._rests[tried] = np.minimum(2 * self._rests[tried], _LONGEST_REST)
        self._is_tried[rows[wanted > 0]] = is_tried[wanted > 0]
        return Drafts(chosen, token_ids[self.odds.places < chosen[:, None]])

    def _draft(self, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Of rows [n], wanted[i] tokens of row i -> [n, num_drafts] int32."""
        token_ids, drafting = np.zeros((len(rows), self._num_drafts), dtype=np.int32), np.flatnonzero(wanted)
        if len(drafting):
            rows, counts = rows[drafting], wanted[drafting]
            known = self.rows.num_tokens[rows]
            behind = self._behind_of(rows)
            found = self._runs.draft(rows, known - 1, counts) if behind is None else behind.token_ids(rows)
            token_ids[drafting, : found.shape[1]] = found
            self.odds.predicted(rows, token_ids[drafting], counts, np.ones_like(counts), known)
            self._drafted_at[rows] = known
        return token_ids

    def _limited(self, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """wanted [n] of rows [n], or fewer, where drafts are there."""
        drafting = np.flatnonzero(wanted)
        behind, limited = self._behind_of(rows[drafting]), wanted.copy()
        if behind is not None:
            num_there = behind.num_drafts(rows[drafting], self.rows.num_tokens[rows[drafting]] - 1)
            limited[drafting] = np.minimum(wanted[drafting], num_there)
        return limited

    def _behind_of(self, rows: np.ndarray) -> DraftsBehind | None:
        """With drafts of all of rows [n]."""
        return self._behind if len(rows) and self._is_behind[rows].all() else None

    @property
    def _are_many(self) -> bool:
        return int(np.count_nonzero(self._features.is_followed)) > _MOST_TRIED

    def _is_due(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[n] bool: of rows [n], those that have had no drafts for long, and may have most [n]."""
        num_rested = self.rows.num_tokens[rows] - self._drafted_at[rows]
        is_due: np.ndarray = num_rested >= (_REST if self._are_many else self._rests[rows])
        is_due &= self._features.is_followed[rows] & (most > 0) & (self.margin < np.inf)
        return is_due

    def _choose(self, rows: np.ndarray, most: np.ndarray, num_tokens: int) -> np.ndarray:
        if self.margin < np.inf:
            self._asked = max(_MARGIN, self.margin)
        limits = np.where(self._features.is_followed[rows], most, 0)
        return self.odds.choose(rows, limits, num_tokens, self.costs, self.margin)

    def _is_worthwhile(self) -> bool:
        """Whether drafts would pay in a step of the rows there are, with the odds of all."""
        num_rows = 1 + int(np.count_nonzero(self.rows.num_tokens))
        num_drafts = np.arange(self._num_drafts + 1)
        gained = (self.odds.of_all() ** num_drafts).cumsum()
        cost = self.costs.relative(num_rows, num_rows * self._num_drafts, num_rows)[num_rows * num_drafts]
        return bool((gained >= self._asked * cost).any())
