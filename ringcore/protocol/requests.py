"""A request enters, tokens leave: the same from the client to the scheduler and back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ringcore.params.outputs import FinishReason
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import FloatArray

__all__ = [
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
    """`errors.error_to_wire` as a type: what `errors.error_from_wire` raises again."""

    type: str
    message: str
    details: dict[str, Any] = {}


class EngineCoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request as EngineCore takes it: token ids only. `arrival_s` is on the host's monotonic clock."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = []  # the words of `sampling_params.bad_words`, by the model's tokenizer


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position: the sampled token first, then the most likely, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at positions 1 to n - 1 of a prompt of n tokens, each under the tokens before it; all of them,
    in the step that computes the prompt's last token.

    The columns have `1 + count` entries a position: the prompt's own token first, then the `count` most likely, best
    first.
    """

    row: int
    count: int
    token_ids: np.ndarray  # [(n - 1) * (1 + count)] int32
    logprobs: FloatArray  # likewise
    ranks: np.ndarray  # likewise, int32; 1 is the most likely


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one request gained in one step. The last one of a request has a finish reason (or an error)."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a new token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id, None for the model's own end of text
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    error: WireError | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first new token


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step."""

    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since start
    num_prefix_hit_tokens: int  # since start
    num_prefix_query_tokens: int  # since start
    is_sleeping: bool = False  # no step is begun before a wake-up, or before the end of an update of weights


class EngineCoreOutputs(msgspec.Struct, frozen=True):
    """What a step gave, request by request."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats


class StartedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request was given a row; from here on the row stands for it, until another one is given the row."""

    row: int
    request_id: str
    num_cached_tokens: int
    first_scheduled_s: float
    num_preemptions: int


class OutputColumns(msgspec.Struct, frozen=True, tag="outputs"):
    """`EngineCoreOutputs` as columns: nothing in it is made for each request and step. Read in the order of the fields
    (`engine_core.output_reader`).
    """

    started: list[StartedRequest]
    rows: np.ndarray  # [num_rows] int32: those that gained tokens and go on
    token_ids: np.ndarray  # [num_rows * num_steps] int32: row after row, the same number each
    logprobs: list[TokenLogprobs | None] | None  # as `token_ids`, where any row asked
    others: list[EngineCoreOutput]  # the last output of requests that ended, tokens of this step among them
    stats: EngineStats
    prompt_logprobs: list[PromptLogprobs] = []  # of rows in `rows`; of those that ended it is in `others`

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read in it but the stats."""
        return not (self.started or len(self.rows) or self.others)
