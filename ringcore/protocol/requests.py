"""Requests and outputs: the same types from the client to the scheduler and back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ringcore.params.outputs import FinishReason
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import FloatArray

__all__ = [
    "NO_STATS",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineStats",
    "OutputColumns",
    "PromptLogprobs",
    "StartedRequest",
    "TokenLogprobs",
    "WireError",
]


class WireError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of `errors.error_to_wire` as a type; `errors.error_from_wire` makes the exception again."""

    type: str
    message: str
    details: dict[str, Any] = {}


class EngineCoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to EngineCore: token ids only. `arrival_s` is on the host's monotonic clock."""

    request_id: str
    prompt_token_ids: list[int] | bytes  # bytes: int32 each, as the front end sends them
    sampling_params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = []  # the words of `sampling_params.bad_words`, by the model's tokenizer

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) // (4 if isinstance(self.prompt_token_ids, bytes) else 1)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position: the sampled token first, then the top tokens, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at positions 1 to n - 1 of a prompt of n tokens, each conditioned on the tokens before it; sent
    at once, with the step that computes the prompt's last token.

    The columns have `1 + count` entries per position: the prompt's own token first, then the top `count`, best first.
    """

    row: int
    count: int
    token_ids: np.ndarray  # [(n - 1) * (1 + count)] int32
    logprobs: FloatArray  # likewise
    ranks: np.ndarray  # likewise, int32; 1 is the most likely


class PooledPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The pooled hidden states of a prompt, sent with the step that computes its last token."""

    row: int
    values: FloatArray  # [hidden_size]


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of one request in one step. The last one of a request has a finish reason (or an error)."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id; None for EOS
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    error: WireError | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first new token
    pooled: PooledPrompt | None = None  # likewise


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step."""

    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since start
    num_prefix_hit_tokens: int  # since start
    num_prefix_query_tokens: int  # since start
    is_sleeping: bool = False  # no step starts until a wake-up, or until a weight update ends


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)  # of an engine that has reported none


class EngineCoreOutputs(msgspec.Struct, frozen=True):
    """The outputs of a step, per request."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats


class StartedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request was assigned a row of the persistent batch; the row refers to it until it is assigned again."""

    row: int
    request_id: str
    num_cached_tokens: int
    first_scheduled_s: float
    num_preemptions: int


class OutputColumns(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """`EngineCoreOutputs` as columns, without an object per request and step. Apply it in the order of the fields
    (`output_reader`).
    """

    started: list[StartedRequest]
    rows: np.ndarray  # [num_rows] int32: rows with new tokens that have not ended
    token_ids: np.ndarray  # [num_new_tokens] int32: row-major, equally many of each row unless `num_gained` is given
    logprobs: list[TokenLogprobs | None] | None  # as `token_ids`, if any row asked for them
    others: list[EngineCoreOutput]  # the last output of requests that ended, including this step's tokens
    stats: EngineStats
    prompt_logprobs: list[PromptLogprobs] = []  # of rows in `rows`; of those that ended it is in `others`
    num_gained: np.ndarray | None = None  # [num_rows] int32: new tokens of each row
    pooled: list[PooledPrompt] = []  # as `prompt_logprobs`

    @property
    def is_empty(self) -> bool:
        """Whether it has only stats."""
        return not (self.started or len(self.rows) or self.others)
