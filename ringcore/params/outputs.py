"""The outputs of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ringcore.errors import RingcoreError

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "RequestMetrics", "RequestOutput"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability under the model's raw distribution, and its rank (1 = most likely)."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timestamps of a request on the host's monotonic clock, in seconds; None until reached."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, as far as it is generated.

    `logprobs` has one dict per generated token, from token id to `Logprob`: the sampled token and the most
    likely ones. `stop_reason` is the stop string or stop token id that ended it, None for end of text.
    In a stream of deltas `text`, `token_ids` and `logprobs` cover this output only (`cumulative_logprob` covers all so
    far), and a completion that has ended before the others stays in the list, empty, with its `finish_reason`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. `error` is set, and `outputs` may be empty, where the request failed.

    `prompt_logprobs`, if requested, arrive with the first token: for each token of the prompt a dict from
    token id to `Logprob`, the prompt's own token and the most likely ones; None for the first, which has no context.
    In a stream of deltas they are in one output only.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: RingcoreError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    # [hidden_size] float32: with the first token and from then on, if `pooling` asked for it.
    pooled: np.ndarray | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        if self.error is not None:
            return True
        for one in self.outputs:
            if one.finish_reason is None:
                return False
        return bool(self.outputs)
