"""A step: one value down to every worker, one value back."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import PromptLogprobs, TokenLogprobs

__all__ = [
    "ModelRunnerOutput",
    "NewBlocks",
    "NewRequest",
    "PendingOutput",
    "RowError",
    "SchedulerOutput",
]


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that gets a row: new, or resumed after a preemption (then its generated tokens are in `token_ids`).

    num_computed_tokens <= num_cached_tokens: the slots of the first num_cached_tokens tokens hold their keys and
    values, and may be shared. Of a prompt that is wholly cached the last token is computed again, for its logits; its
    slot is read and not written.

    The request's `prompt_logprobs` are wanted exactly if it comes with its prompt alone; then nothing is cached.
    """

    row: int
    token_ids: np.ndarray  # [num_tokens] int32: the prompt, then tokens generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: list[np.ndarray]  # by KV cache group: [num_blocks] int32; 0 where the window has left the block behind
    sampling_params: SamplingParams
    seed: int  # the request's own, or one that the engine drew
    stop_token_ids: list[int]  # barred until min_tokens; the model's end of text among them unless ignored
    bad_words_token_ids: list[list[int]] = []  # none of these sequences is completed


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """block_ids[i] is appended to the block table of rows[i] in one KV cache group. A row may come several times."""

    rows: np.ndarray  # [n] int32
    block_ids: np.ndarray  # [n] int32


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step for every rank, or `num_steps` of them. Applied in the order of the fields.

    A row samples a token in this step exactly if all its known tokens are computed after it: the worker sees
    that from its own rows, as the scheduler does from its own.

    With num_steps > 1 every row computes its one token that is left, samples, and does so again with the token that it
    sampled, num_steps times in all; the blocks for that are there.
    """

    step: int  # of the first, where there are several
    num_steps: int
    finished_rows: np.ndarray  # [n] int32: rows given back since the last step (finished, aborted, preempted)
    new_requests: list[NewRequest]
    new_blocks: list[NewBlocks]  # by KV cache group; empty where no group has any
    rows: np.ndarray | None  # [num_scheduled] int32; None: those of the step before, in its order
    num_scheduled_tokens: np.ndarray | None  # [num_scheduled] int32, each at least 1; None: one token each
    num_tokens: int  # that are computed, over all rows and steps


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row's request cannot go on (its logits are not finite, say); the others are unharmed."""

    row: int
    message: str


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled, in the order of `SchedulerOutput.rows`; rows that sampled nothing, or that have an error,
    are left out.
    """

    step: int
    rows: np.ndarray | None  # [num_sampled] int32; None: all of the step's rows
    token_ids: np.ndarray  # [num_sampled * num_steps] int32: row after row, num_steps each
    logprobs: list[TokenLogprobs | None] | None = None  # as `token_ids`, where any row asked
    row_errors: list[RowError] = []
    prompt_logprobs: list[PromptLogprobs] = []  # of rows that asked, where this step computed their prompt's last token


class PendingOutput(Protocol):
    """What a worker may return of a step in place of its output: the step is launched on the device, and the next one
    may be launched before the output of this one is taken. It is sent nowhere.

    Whoever holds several of one worker takes their results in the order of the steps, on the worker's own thread.
    """

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once. It is asked often, and must be cheap: a microsecond."""
        ...

    def result(self) -> ModelRunnerOutput | None:
        """What `execute_model` would have returned, or raised. Waits; called once, and always, also on ranks that owe
        no output."""
        ...
