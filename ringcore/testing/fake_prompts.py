"""What a fake worker reports of prompts: uniform log-probabilities, and pooled states that tell the prompt."""

from __future__ import annotations

import math

import numpy as np

from ringcore.params.sampling_params import Pooling
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import PooledPrompt, PromptLogprobs
from ringcore.protocol.steps import NewRequest

__all__ = ["POOLED_SIZE", "FakePrompts"]

POOLED_SIZE = 16


class FakePrompts:
    """The prompts whose report is due: it comes with the first token of their rows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._logprobs: dict[int, tuple[int, np.ndarray]] = {}  # by row: the number asked for, and the prompt
        self._pooled: dict[int, tuple[Pooling, np.ndarray]] = {}  # by row

    def note(self, request: NewRequest) -> None:
        row, params = request.row, request.sampling_params
        self.forget(row)
        if len(request.token_ids) > request.num_prompt_tokens:
            return
        if params.prompt_logprobs is not None:
            assert request.num_cached_tokens == 0, f"row {row}: prompt logprobs with a prefix cache hit"
            count = self._vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
            self._logprobs[row] = count, request.token_ids
        if params.pooling is not None:
            assert params.pooling == "last" or request.num_cached_tokens == 0, f"row {row}: a mean with a cache hit"
            self._pooled[row] = params.pooling, request.token_ids

    def forget(self, row: int) -> None:
        self._logprobs.pop(row, None)
        self._pooled.pop(row, None)

    def logprobs(self, rows: np.ndarray) -> list[PromptLogprobs]:
        """Of the requests in `rows` that sample their first token."""
        return [self._prompt_logprobs(row) for row in rows.tolist() if row in self._logprobs] if self._logprobs else []

    def pooled(self, rows: np.ndarray) -> list[PooledPrompt]:
        """Likewise: as if the state of a token were the unit vector of its id modulo `POOLED_SIZE`."""
        return [self._pooled_prompt(row) for row in rows.tolist() if row in self._pooled] if self._pooled else []

    def _prompt_logprobs(self, row: int) -> PromptLogprobs:
        count, prompt = self._logprobs.pop(row)
        top = np.arange(count, dtype=np.int32)
        token_ids = np.hstack([prompt[1:, None], (prompt[1:, None] + top) % self._vocab_size])
        ranks = np.broadcast_to(np.concatenate([[1], 1 + top]), token_ids.shape)
        logprobs = np.full(token_ids.size, -math.log(self._vocab_size), np.float32)
        return PromptLogprobs(row, count, int_array(token_ids), logprobs, int_array(ranks))

    def _pooled_prompt(self, row: int) -> PooledPrompt:
        pooling, prompt = self._pooled.pop(row)
        taken = prompt[-1:] if pooling == "last" else prompt
        counts = np.bincount(taken % POOLED_SIZE, minlength=POOLED_SIZE)
        return PooledPrompt(row, (counts / len(taken)).astype(np.float32))
