"""A step in flight on a GPU, and how the host reads it from the result ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringcore.kernels.step_state import BAD_HIDDEN, BAD_LOGITS
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
    words: np.ndarray | None = None  # [n] int32: the result ring's words; None: not read yet

    def done(self) -> bool:
        return self.reader.ring.is_over(self.number)

    def read(self) -> None:
        self.reader.read(self)

    def sampled(self) -> SampledRows:
        assert self.words is not None
        logprobs = None
        if self.logprobs is not None:
            found = self.logprobs.result()
            logprobs = [found[index] for index in self.sampling.argsort().argsort().tolist()]
        token_ids = self.words[self.sampling] & ~_FLAGS
        return SampledRows(self.rows[self.sampling], token_ids, logprobs, self.prompt_logprobs, self.pooled)


class StepReader:
    def __init__(self, stages: StepStages, ring: ResultRing) -> None:
        self._stages, self.ring = stages, ring

    def read(self, step: DeviceStep) -> None:
        """Reads the step's words from the ring, once; adds to its errors, and zeroes the KV of non-finite rows."""
        if step.words is not None:
            return
        words = step.words = self.ring.take(step.number, len(step.rows))
        if step.is_adjusted:
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
        is_current = (all_rows.num_admissions[rows] == step.admissions[places]) & (counts > 0)
        if is_current.any():
            rows, counts, starts = rows[is_current], counts[is_current], starts[is_current]
            self._stages.paged.zero_kv(InputBatch.gather(all_rows, rows, counts, self._stages.device, starts=starts))
