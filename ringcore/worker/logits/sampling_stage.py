"""The sampling stage of a step, on every device: adjust, draw, finish, count, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ringcore.model_executor.sampler import PendingLogprobs, launch_logprobs
from ringcore.protocol.steps import RowError
from ringcore.worker.logits.draft_adjustments import DraftPlaces, adjust_drafts, count_drafts
from ringcore.worker.logits.row_adjustments import RowAdjustments
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["ALL_MASKED", "Draw", "Finish", "SampledTokens", "SamplingStage", "not_finite"]

ALL_MASKED = 1  # in place of a token id: the row's logits are finite, but its adjustments mask every token

# Logits [n, vocab_size] of any float dtype -> token ids [n] int64 and ok [n] bool, both on the logits' device.
Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Takes the drawn token ids [n] and ok [n] as soon as they are final.
Finish = Callable[[torch.Tensor, torch.Tensor], None]


class SampledTokens(NamedTuple):
    """The samples of n rows, on the device."""

    token_ids: torch.Tensor  # [n] int64; of a row that is not ok 0 or `ALL_MASKED`, if the step is adjusted
    ok: torch.Tensor  # [n] bool: the row has a finite best logit and no NaN
    logprobs: PendingLogprobs | None  # None also on ranks that return no output
    is_adjusted: bool  # whether any row's logits were adjusted before the draw


class SamplingStage:
    """Every rank samples the same tokens: logits are bitwise equal on all ranks, and the draw is by a counter-based RNG
    of the row's seed and the token's position. So no rank broadcasts its samples."""

    def __init__(
        self, rows: RequestRows, adjustments: RowAdjustments, is_output_rank: bool, by_row: bool = False
    ) -> None:
        """by_row: see `launch_logprobs`."""
        self._by_row = by_row
        self._rows, self._adjustments, self._is_output_rank = rows, adjustments, is_output_rank

    def is_adjusted(self, rows: np.ndarray) -> bool:
        """Whether any of rows [n] has its logits adjusted."""
        return bool(self._adjustments.is_adjusted[rows].any())

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, draw: Draw, finish: Finish, errors: dict[int, RowError]
    ) -> SampledTokens:
        """Samples one token for each of rows [n] from the model's logits [n, vocab_size]. Does not wait for the device.

        finish: called before counts and log-probabilities are launched, so that the host learns the tokens early. Adds
        to `errors`, by row, what the adjustments report.
        """
        is_adjusted = self.is_adjusted(rows)
        adjusted = self._adjustments.adjust(logits, rows, self._rows.generated, errors) if is_adjusted else logits
        token_ids, ok = draw(adjusted)
        del adjusted  # frees the memory for log-probabilities, which are of the model's raw logits
        if is_adjusted:
            _mark_fully_masked(logits, token_ids, ok)
        finish(token_ids, ok)
        if is_adjusted:
            self._adjustments.count(rows, token_ids)
        return SampledTokens(token_ids, ok, self.launch_logprobs(logits, token_ids, rows), is_adjusted)

    def sample_drafts(
        self,
        logits: torch.Tensor,
        places: DraftPlaces,
        draw: Draw,
        finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        errors: dict[int, RowError],
    ) -> SampledTokens:
        """As `sample`, after each place of a step with drafts: logits [num_places, vocab_size].

        finish: finds what each row gained: [num_places] int32, 1 where it gained the token.
        """
        is_adjusted, adjusted = self.is_adjusted(places.rows), logits
        if is_adjusted:
            adjusted = adjust_drafts(self._adjustments, logits, places, self._rows.generated, errors)
        token_ids, ok = draw(adjusted)
        del adjusted
        if is_adjusted:
            _mark_fully_masked(logits, token_ids, ok)
        gained = finish(token_ids, ok)
        if is_adjusted:
            count_drafts(self._adjustments, places, token_ids, gained)
        return SampledTokens(token_ids, ok, self.launch_logprobs(logits, token_ids, places.rows), is_adjusted)

    def launch_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: np.ndarray
    ) -> PendingLogprobs | None:
        """The log-probabilities of token_ids [n] under the raw logits [n, vocab_size], of those of rows [n] that asked;
        None on ranks that return no output."""
        if not self._is_output_rank:
            return None
        return launch_logprobs(logits, token_ids, self._rows.parameters["num_logprobs"][rows], self._by_row)


def _mark_fully_masked(logits: torch.Tensor, token_ids: torch.Tensor, ok: torch.Tensor) -> None:
    """Sets token_ids [n] of rows that are not ok to `ALL_MASKED` where the model's logits [n, vocab_size] are finite;
    else to 0."""
    was_finite = torch.isfinite(logits.amax(dim=-1))  # NaN is the largest
    token_ids.copy_(torch.where(ok, token_ids, was_finite * ALL_MASKED))


def not_finite(row: int, what: str, dtype: str) -> RowError:
    """The error of a row whose logits or hidden states are infinite or NaN. dtype: the model's compute dtype."""
    return RowError(
        row,
        f"the model's {what} are not finite numbers in {dtype}; use dtype='float32', or check the checkpoint's weights",
    )
