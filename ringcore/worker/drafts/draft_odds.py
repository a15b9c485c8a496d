"""How many drafts a row gets: by how often such drafts were right lately, and by what they cost."""

from __future__ import annotations

import numpy as np

from ringcore.worker.drafts.step_costs import StepCosts

__all__ = ["DraftOdds"]

_ROW_DECAY, _ALL_DECAY = 0.97, 0.998  # of a count, for each token that tells
_PRIOR = 3.0  # tokens by which a row's odds are those of all rows
_LEAST_SPEED = 0.98  # of a row in a step with drafts, against one without
_AT_FIRST = (0.3, 0.5, 0.7)  # the odds of a match of each length, before any was seen


class DraftOdds:
    """Each new token of a row tells whether the draft at its place was right, also if no step verified it: so the odds
    of a row that has no drafts at present cost nothing to follow.

    Counted by the length of the match, since a longer one is right more often, of each row and of all rows together.
    """

    def __init__(
        self, max_rows: int, num_drafts: int, lengths: tuple[int, ...], at_first: tuple[float, ...] = _AT_FIRST
    ) -> None:
        """lengths: of the index's n-grams, the classes of a match. at_first: the odds of each."""
        self._lengths, self.places = np.array(lengths), np.arange(num_drafts)
        self.token_ids = np.zeros((max_rows, num_drafts), dtype=np.int32)  # predicted, of which `counts` count
        self.counts, self._kinds, self.num_known = np.zeros((3, max_rows), dtype=np.int64)
        self._right, self._seen = np.zeros((2, max_rows, len(lengths)))
        self._all_right, self._all_seen = _PRIOR * np.array(at_first), np.full(len(lengths), _PRIOR)

    def admit(self, row: int) -> None:
        self.counts[row] = 0
        self._right[row] = self._seen[row] = 0

    def observe(self, rows: np.ndarray, token_ids: np.ndarray, num_known: np.ndarray) -> None:
        """Compares the tokens that rows [n] gained with the predicted ones. token_ids: [max_rows, max_len], of which
        num_known [n] are known."""
        gained = np.minimum(num_known - self.num_known[rows], self.counts[rows])
        telling = np.flatnonzero(gained > 0)
        if not len(telling):
            return
        rows, gained = rows[telling], gained[telling]
        places = np.minimum(self.num_known[rows][:, None] + self.places, token_ids.shape[1] - 1)
        same = (token_ids[rows[:, None], places] == self.token_ids[rows]) & (self.places < gained[:, None])
        right = np.where(same.all(axis=1), len(self.places), same.argmin(axis=1))
        seen = np.minimum(right + 1, gained)  # behind a wrong one the others tell nothing
        kinds = self._kinds[rows]
        decay = _ROW_DECAY**seen
        self._right[rows, kinds] = self._right[rows, kinds] * decay + right
        self._seen[rows, kinds] = self._seen[rows, kinds] * decay + seen
        right_of = np.bincount(kinds, weights=right, minlength=len(self._lengths))
        seen_of = np.bincount(kinds, weights=seen, minlength=len(self._lengths))
        self._all_right = self._all_right * _ALL_DECAY**seen_of + right_of
        self._all_seen = self._all_seen * _ALL_DECAY**seen_of + seen_of

    def predicted(
        self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray, lengths: np.ndarray, num_known: np.ndarray
    ) -> None:
        """token_ids: [n, num_drafts], of which counts [n] count, the continuation of rows [n] after num_known [n]
        tokens by a match of lengths [n] tokens."""
        self.token_ids[rows], self.counts[rows], self.num_known[rows] = token_ids, counts, num_known
        self._kinds[rows] = np.maximum(np.searchsorted(self._lengths, lengths, side="right") - 1, 0)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """[n]: the odds that the next draft of each row is right, if those before it were."""
        kinds = self._kinds[rows]
        of_all = self._all_right[kinds] / self._all_seen[kinds]
        odds: np.ndarray = (self._right[rows, kinds] + _PRIOR * of_all) / (self._seen[rows, kinds] + _PRIOR)
        return odds

    def of_all(self) -> float:
        """Of a draft of any row, if those before it were right."""
        return float(self._all_right.sum() / self._all_seen.sum())

    def choose(
        self, rows: np.ndarray, most: np.ndarray, num_tokens: int, costs: StepCosts, margin: float
    ) -> np.ndarray:
        """Divides drafts among rows [n], at most most[i] for row i -> [n] int64: as many as promise the most tokens a
        second of a step that has num_tokens besides, and slow no row for the drafts of others. None where that is not
        margin times as many as without."""
        places, total = self.places, int(most.sum())
        if not total or margin == np.inf:
            return np.zeros(len(rows), dtype=np.int64)
        odds = np.where(places < most[:, None], self.of(rows)[:, None] ** (places + 1), 0.0)
        order = np.argsort(-odds, axis=None, kind="stable")  # of a row the nearer ones come first
        order = order[:total]
        of_draft = odds.reshape(-1)[order]
        promised = np.concatenate(([0.0], np.cumsum(of_draft)))
        cost = costs.relative(num_tokens, len(order), len(rows))
        least = np.zeros(len(order) + 1)  # what each of them promises the row that gains least
        if most.all() and total >= len(rows):
            of_row = np.zeros((len(order) + 1, len(rows)))
            of_row[np.arange(1, len(order) + 1), order // len(places)] = of_draft
            least = of_row.cumsum(axis=0).min(axis=1)
        is_fair = 1 + least >= _LEAST_SPEED * cost
        speed = np.where(is_fair, (len(rows) + promised) / (len(rows) * cost), 0.0)
        best = int(speed.argmax())
        if speed[best] < margin:
            best = 0
        return np.bincount(order[:best] // len(places), minlength=len(rows))
