"""One step: the scheduler's output to every worker, and the model runner's output back."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import PooledPrompt, PromptLogprobs, TokenLogprobs
from ringcore.protocol.stored_kv import KVTransfers

__all__ = [
    "ModelRunnerOutput",
    "NewBlocks",
    "NewRequest",
    "PendingOutput",
    "RowError",
    "SchedulerOutput",
]


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that is assigned a row of the persistent batch: new, or resumed after a preemption (then its generated
    tokens are in `token_ids`).

    num_computed_tokens <= num_cached_tokens: the slots of the first num_cached_tokens tokens hold their keys and
    values (prefix cache hit), and may be shared. If the whole prompt is cached its last token is recomputed for its
    logits; its slot is read and not written.

    The request's `prompt_logprobs` are computed only if it has no generated tokens yet; then it has no cached tokens.
    """

    row: int
    token_ids: np.ndarray  # [num_tokens] int32: the prompt, then tokens generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: list[np.ndarray]  # by KV cache group: [num_blocks] int32; 0 (null block) outside the sliding window
    sampling_params: SamplingParams
    seed: int  # the request's own, or one that the engine drew
    stop_token_ids: list[int]  # masked until min_tokens; includes EOS unless ignore_eos
    bad_words_token_ids: list[list[int]] = []  # sequences that must not be generated
    cache_salt: str | None = None  # requests share what they wrote only within one salt; an empty string is a salt


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """block_ids[i] is appended to the block table of rows[i] in one KV cache group. A row may occur several times."""

    rows: np.ndarray  # [n] int32
    block_ids: np.ndarray  # [n] int32


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step for every rank, or `num_steps` of them (multi-step). Applied in the order of the fields.

    A row samples a token in this step exactly if all its known tokens are computed after it (else the step is a chunk
    of its prefill): the worker derives that from its own rows, as the scheduler does from its own.

    With num_steps > 1 every row decodes num_steps tokens, each from the one sampled before; the blocks for them are
    allocated.

    With `max_gained` (speculative decoding, num_steps is 1) a row that samples may gain up to max_gained[i] tokens: the
    worker may compute max_gained[i] - 1 draft tokens after the row's last known token, in slots that are allocated and
    within the step's token budget, and append those that the model accepts and one more. It may use fewer, or none.
    """

    step: int  # the number of the first step
    num_steps: int
    finished_rows: np.ndarray  # [n] int32: rows freed since the last step (finished, aborted, preempted)
    new_requests: list[NewRequest]
    new_blocks: list[NewBlocks]  # by KV cache group; empty if no group has any
    rows: np.ndarray | None  # [num_scheduled] int32; None: those of the previous step, in its order
    num_scheduled_tokens: np.ndarray | None  # [num_scheduled] int32, each at least 1; None: one token each
    num_tokens: int  # known tokens that are computed, over all rows and steps; without drafts
    max_gained: np.ndarray | None = None  # [num_scheduled] int32, each at least 1; None: one token each and step
    kv_transfers: KVTransfers | None = None  # before the step; it may have no rows then
    # With `max_gained`: how many times the tokens a second of a step without drafts one with drafts must promise.
    draft_margin: float = 1.0

    def composition(self) -> tuple[int, int, int, int, int, int]:
        """For a trace: the first step, the number of steps, rows, those that compute one token, tokens, and new
        requests."""
        counts = self.num_scheduled_tokens
        num_rows = self.num_tokens // self.num_steps if counts is None else len(counts)
        num_decoding = num_rows if counts is None else int((counts == 1).sum())
        return self.step, self.num_steps, num_rows, num_decoding, self.num_tokens, len(self.new_requests)


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row's request failed (for example its logits are not finite); the others are not affected."""

    row: int
    message: str


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The sampled tokens of a step, in the order of `SchedulerOutput.rows`; without rows that sampled no token or that
    have an error.
    """

    step: int
    rows: np.ndarray | None  # [num_sampled] int32; None: all of the step's rows
    token_ids: np.ndarray  # [num_tokens] int32: row-major, num_steps each unless `num_gained` says otherwise
    logprobs: list[TokenLogprobs | None] | None = None  # as `token_ids`, if any row asked for them
    row_errors: list[RowError] = []
    prompt_logprobs: list[PromptLogprobs] = []  # of rows that asked and whose prompt ends in this step
    num_gained: np.ndarray | None = None  # [num_sampled] int32: tokens of each, 1 to its `max_gained`; None: num_steps
    pooled: list[PooledPrompt] = []  # as `prompt_logprobs`
    num_drafts: np.ndarray | None = None  # [num_sampled] int32: drafts of each that the model verified; None: none


class PendingOutput(Protocol):
    """A worker may return this in place of a step's output: the step is launched on the device, and the next one may be
    launched before this one's output is read (async scheduling). It is never sent.

    The worker's own thread reads the results, in the order of the steps.
    """

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once. It is polled often and must take about a microsecond."""
        ...

    def result(self) -> ModelRunnerOutput | None:
        """The return value of `execute_model`, or its error. Blocks; called exactly once, also on ranks that send no
        output."""
        ...
