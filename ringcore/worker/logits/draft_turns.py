"""Rows that sample after their last token and after drafts, turn by turn.

In the first turn each row samples after its last token. A row whose token is its next draft samples again in the next
turn, after that draft, and so on: each token is sampled by the rules of any other, from the logits that a step of its
own would have had, by the random numbers of its position. So what the adjustments of a row keep (token counts, the
state of a grammar) never needs to be rolled back: they see only tokens that the row has.
"""

from __future__ import annotations

import numpy as np
import torch

from ringcore.protocol.requests import TokenLogprobs
from ringcore.worker.logits.step_output import SampledRows
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["DraftTurns"]


class DraftTurns:
    """The turns of one step, of rows [n] that sample."""

    def __init__(self, rows: RequestRows, sampling: np.ndarray, drafts: np.ndarray | None) -> None:
        """sampling: rows [n] int32, n > 0. drafts: [n], how many each has after its known tokens; None: none."""
        self._all_rows, self._sampling, self._drafts = rows, sampling, drafts
        self._left = np.zeros(len(sampling), dtype=np.int64) if drafts is None else drafts.copy()
        self._places = np.arange(len(sampling)) if drafts is None else np.cumsum(1 + drafts) - 1 - drafts
        self._going = np.arange(len(sampling))  # of this turn
        self._accepted = np.zeros(0, dtype=bool)  # [m]: of this turn, whose draft was accepted
        self._turns: list[tuple[np.ndarray, np.ndarray, list[TokenLogprobs | None] | None]] = []

    @property
    def rows(self) -> np.ndarray:
        """[m] int32: the rows of this turn; empty after the last."""
        return self._sampling[self._going]

    def logits_of(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_positions, vocab_size] of the step -> [m, vocab_size] of this turn."""
        places = self._places[self._going]
        return logits if len(places) == len(logits) else logits[torch.from_numpy(places).to(logits.device)]

    def append(self, token_ids: np.ndarray) -> None:
        """Appends this turn's tokens [m] int32 to the rows, and counts accepted drafts as computed."""
        rows, all_rows = self.rows, self._all_rows
        if self._drafts is None:
            all_rows.append_tokens(rows, token_ids)
            return
        accepted = self._left[self._going] > 0
        if accepted.any():
            drafts = all_rows.token_ids[rows[accepted], all_rows.num_tokens[rows[accepted]]]
            accepted[accepted] = drafts == token_ids[accepted]
        all_rows.append_tokens(rows, token_ids)
        all_rows.advance(rows[accepted], None)
        self._accepted = accepted

    def end(self, token_ids: np.ndarray, logprobs: list[TokenLogprobs | None] | None) -> None:
        """Ends the turn, of which these [m] are the tokens; the next one is of the rows whose draft was accepted."""
        self._turns.append((self._going, token_ids, logprobs))
        if self._drafts is None:
            self._going = self._going[:0]
            return
        self._going = self._going[self._accepted]
        self._left[self._going] -= 1
        self._places[self._going] += 1

    def sampled(self) -> SampledRows:
        """All turns' tokens, row-major."""
        if self._drafts is None:
            ((_, token_ids, logprobs),) = self._turns
            return SampledRows(self._sampling, token_ids, logprobs)
        of_row = np.concatenate([going for going, _, _ in self._turns])
        order = np.argsort(of_row, kind="stable")
        token_ids = np.concatenate([token_ids for _, token_ids, _ in self._turns])[order]
        num_gained = np.bincount(of_row, minlength=len(self._sampling))
        logprobs = None
        if any(found is not None for _, _, found in self._turns):
            flat = [one for going, _, found in self._turns for one in (found or [None] * len(going))]
            logprobs = [flat[place] for place in order.tolist()]
        return SampledRows(self._sampling, token_ids, logprobs, num_gained=num_gained, num_drafts=self._drafts)
