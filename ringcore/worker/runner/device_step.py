"""A step in flight on a GPU, and how the host reads it from the result ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ringcore.kernels.steps.step_state import BAD_HIDDEN, BAD_LOGITS, NOT_GAINED_BAD
from ringcore.model_executor.sampler import PendingLogprobs
from ringcore.protocol.steps import RowError
from ringcore.worker.logits.pooled_prompts import LaunchedPooledPrompt
from ringcore.worker.logits.prompt_logprobs import LaunchedPromptLogprobs
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.logits.row_adjustments import NO_TOKEN_LEFT
from ringcore.worker.logits.sampling_stage import ALL_MASKED, not_finite
from ringcore.worker.logits.step_output import SampledRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.runner.step_launcher import StepStages

__all__ = ["DeviceStep", "StepReader"]

_FLAGS = BAD_LOGITS | BAD_HIDDEN


@dataclass(slots=True)
class DeviceStep:
    """One step in flight."""

    reader: StepReader
    number: int  # in the result ring
    rows: np.ndarray  # [n] int32, in the order of the batch
    starts: np.ndarray  # [n] int64: the position of each row's first token in the step
    ends: np.ndarray  # [n] int64: one past the position of each row's last token in the step
    admissions: np.ndarray  # [n]: identifies the row's request, see `RequestRows.num_admissions`
    sampling: np.ndarray  # [num_sampled]: batch indices of the rows that sample, in the message's order
    logprobs: PendingLogprobs | None  # in the order of the batch
    errors: dict[int, RowError]  # of the whole message, by row
    is_adjusted: bool  # whether any row's logits were adjusted before sampling
    prompt_logprobs: Sequence[LaunchedPromptLogprobs]
    pooled: Sequence[LaunchedPooledPrompt] = ()
    drafts: np.ndarray | None = None  # [n] int64: of each row, which are in the message's order; None: none
    words: np.ndarray | None = None  # the result ring's words, of each row, or of each place; None: not read yet

    @property
    def num_words(self) -> int:
        return len(self.rows) + (0 if self.drafts is None else int(self.drafts.sum()))

    def gained(self) -> tuple[np.ndarray, np.ndarray]:
        """Of a step that was read: the tokens of the rows that sampled, row-major, and how many each gained."""
        assert self.words is not None
        if self.drafts is None:
            token_ids, counts = self.words[self.sampling], np.ones(len(self.sampling), dtype=np.int64)
        else:
            is_gained = self.words >= 0
            token_ids, counts = self.words[is_gained], np.add.reduceat(is_gained, self.first_places())
        return token_ids & ~_FLAGS, counts

    def first_places(self) -> np.ndarray:
        """[n]: of each row, in a step with drafts."""
        assert self.drafts is not None
        firsts: np.ndarray = np.cumsum(1 + self.drafts) - 1 - self.drafts
        return firsts

    def done(self) -> bool:
        return self.reader.ring.is_over(self.number)

    def read(self) -> None:
        self.reader.read(self)

    def sampled(self) -> SampledRows:
        assert self.words is not None
        (token_ids, counts), logprobs = self.gained(), None
        if self.logprobs is not None:
            order = self.sampling.argsort().argsort() if self.drafts is None else np.flatnonzero(self.words >= 0)
            found = self.logprobs.result()
            logprobs = [found[index] for index in order.tolist()]
        sampled = SampledRows(self.rows[self.sampling], token_ids, logprobs, self.prompt_logprobs, self.pooled)
        return sampled if self.drafts is None else sampled._replace(num_gained=counts, num_drafts=self.drafts)


class StepReader:
    def __init__(self, stages: StepStages, ring: ResultRing) -> None:
        self._stages, self.ring = stages, ring

    def read(self, step: DeviceStep) -> None:
        """Reads the step's words from the ring, once; adds to its errors, and zeroes the KV of non-finite rows."""
        if step.words is not None:
            return
        words = step.words = self.ring.take(step.number, step.num_words)
        if step.drafts is not None:
            words = _last_words(step, words)
        elif step.is_adjusted:
            self._store_token_ids(step, words)
        flagged = np.flatnonzero(words & _FLAGS)
        if not len(flagged):
            return
        is_masked = (words[flagged] == ALL_MASKED | BAD_LOGITS) & step.is_adjusted
        for row in step.rows[flagged[is_masked]].tolist():
            step.errors.setdefault(row, RowError(row, NO_TOKEN_LEFT))
        non_finite = flagged[~is_masked]
        for row, word in zip(step.rows[non_finite].tolist(), words[non_finite].tolist(), strict=True):
            what = "hidden states" if word & BAD_HIDDEN else "logits"
            step.errors.setdefault(row, not_finite(row, what, self._stages.dtype))
        if len(non_finite):
            self._zero_kv_since(step, non_finite)

    def _store_token_ids(self, step: DeviceStep, words: np.ndarray) -> None:
        """Stores the sampled ids of rows that `needs_token_ids`, unless another request has the row by now."""
        rows, places = self._stages.rows, step.sampling
        sampling = step.rows[places]
        is_stored = self._stages.adjustments.needs_token_ids[sampling]
        is_stored &= rows.num_admissions[sampling] == step.admissions[places]
        places = places[is_stored]
        rows.token_ids[sampling[is_stored], step.ends[places]] = words[places] & ~_FLAGS

    @torch.inference_mode()
    def _zero_kv_since(self, step: DeviceStep, places: np.ndarray) -> None:
        """Zeroes the keys and values that the rows at `places` have written since this step began, unless another
        request has the row by now."""
        all_rows = self._stages.rows
        rows, starts = step.rows[places], step.starts[places]
        counts = all_rows.num_computed_tokens[rows] - starts
        if step.drafts is not None:
            counts = np.where(counts > 0, np.maximum(counts, 1 + step.drafts[places]), 0)
        is_current = (all_rows.num_admissions[rows] == step.admissions[places]) & (counts > 0)
        if is_current.any():
            rows, counts, starts = rows[is_current], counts[is_current], starts[is_current]
            drafts = np.maximum(starts + counts - all_rows.num_tokens[rows], 0)  # beyond its last token
            gather = partial(InputBatch.gather, all_rows, rows, counts, self._stages.device, starts=starts)
            self._stages.paged.zero_kv(gather(drafts=drafts) if drafts.any() else gather())


def _last_words(step: DeviceStep, words: np.ndarray) -> np.ndarray:
    """[n]: of each row of a step with drafts the word of the last token that it gained; `BAD_LOGITS` where one of its
    places was not finite."""
    firsts = step.first_places()
    of_rows = words[firsts + np.add.reduceat(words >= 0, firsts) - 1]
    is_bad = np.logical_or.reduceat(words == NOT_GAINED_BAD, firsts)
    return np.where(is_bad, BAD_LOGITS, of_rows)
