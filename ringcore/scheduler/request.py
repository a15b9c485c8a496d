"""A request in the engine process. While it runs, its token counts are in `RunningTable`, not here."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from ringcore.kv_cache.block_hash import NO_EXTRA_KEYS, ExtraKeys
from ringcore.params.outputs import FinishReason
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreRequest,
    PooledPrompt,
    PromptLogprobs,
    StartedRequest,
    TokenLogprobs,
    WireError,
)

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the waiting queue, never scheduled
    RUNNING = "running"  # has a row and blocks
    PREEMPTED = "preempted"  # in the waiting queue again, without row and blocks; its tokens are recomputed
    FINISHED = "finished"


class Request:
    """The scheduler's state of one request, except for its columns. Mutable: the scheduler writes it, and the KV cache
    manager appends to `block_hashes`.
    """

    __slots__ = (
        "arrival_s",
        "bad_words_token_ids",
        "block_hashes",
        "eos_token_ids",
        "extra_keys",
        "first_scheduled_s",
        "has_loaded",
        "max_gain",
        "max_total_tokens",
        "needs_whole_prompt",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_times_passed",
        "num_tokens_to_hold",
        "num_tokens_when_preempted",
        "priority",
        "request_id",
        "row",
        "run",
        "sampling_params",
        "seed",
        "sequence",
        "status",
        "stop_token_ids",
        "tokens",
        "waiting_since_s",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        tokens: np.ndarray,
        *,
        sequence: int,
        max_total_tokens: int,
        stop_token_ids: list[int],
        seed: int,
        eos_token_ids: Sequence[int] = (),
        max_gain: int = 1,
    ) -> None:
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.bad_words_token_ids = request.bad_words_token_ids
        self.arrival_s, self.priority = request.arrival_s, request.priority
        self.sequence = sequence  # its number in the order of arrival
        self.seed = seed
        self.eos_token_ids = eos_token_ids  # the members of `stop_token_ids` that are the model's EOS tokens
        self.stop_token_ids = stop_token_ids  # as NewRequest's: EOS tokens (unless ignored), then the user's
        self.num_prompt_tokens = len(tokens)
        self.max_total_tokens = max_total_tokens  # prompt and generated; the request finishes at this length
        self.max_gain = max_gain  # the most tokens that it may gain in one step

        self.status = RequestStatus.WAITING
        self.tokens = tokens  # [n] int32: the prompt, then the tokens generated before its last preemption
        self.needs_whole_prompt = _needs_whole_prompt(request.sampling_params)
        self.num_tokens_to_hold = len(tokens)  # it is admitted when slots for so many are free
        self.num_times_passed = 0  # skip-ahead: later requests that started while it lacked blocks

        self.row: int | None = None
        self.run: int | None = None  # unique number of its last start
        self.num_tokens_when_preempted = 0  # computed in that run, including steps in flight
        self.extra_keys = NO_EXTRA_KEYS if request.cache_salt is None else ExtraKeys(cache_salt=request.cache_salt)
        self.block_hashes: list[bytes] = []  # stay valid across preemption: tokens never change

        self.waiting_since_s = request.arrival_s  # waiting for a row since it arrived, or was preempted
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens = 0  # prefix cache hit at its first start
        self.num_preemptions, self.has_loaded = 0, False  # has_loaded: stored blocks, since it last had a row

    def start(self, row: int, run: int, num_cached_tokens: int, now_s: float) -> None:
        """Marks it as running; `num_cached_tokens` tokens from the prefix cache count as computed."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
            self.num_cached_tokens = num_cached_tokens
        self.status = RequestStatus.RUNNING
        self.row, self.run = row, run
        self.has_loaded = False

    def preempt(self, tokens: np.ndarray, *, num_total_tokens: int, num_computed_tokens: int, now_s: float) -> None:
        """Preemption by recompute: `tokens`, all that are known, are computed again as if they were the prompt.
        num_total_tokens also counts the tokens that steps in flight would have sampled.

        Those are lost and sampled again. The request is readmitted only with slots for them: with fewer it could be
        preempted again and again before the first of them is known. The last token of all needs no slot.
        """
        self.tokens = tokens
        self.needs_whole_prompt &= len(tokens) == self.num_prompt_tokens
        num_tokens = min(num_total_tokens, self.max_total_tokens - 1)
        self.num_tokens_to_hold = max(self.num_tokens_to_hold, num_tokens)
        self.num_tokens_when_preempted = num_computed_tokens
        self.num_preemptions += 1
        self.waiting_since_s = now_s
        self.status = RequestStatus.PREEMPTED
        self.row = None

    def move_to_cache(self, max_total_tokens: int) -> None:
        """Adapts a waiting request to a new cache that holds at most `max_total_tokens` tokens of one request.

        Its known tokens fit. The block hashes of the old cache mean nothing in the new one.
        """
        assert self.row is None
        self.block_hashes.clear()
        self.has_loaded = False
        self.max_total_tokens = min(self.max_total_tokens, max_total_tokens)
        self.num_tokens_to_hold = min(self.num_tokens_to_hold, self.max_total_tokens - 1)

    def finish(self) -> None:
        self.status = RequestStatus.FINISHED
        self.row = None

    def finish_reason(self, token_id: int, num_tokens: int) -> tuple[FinishReason | None, int | None]:
        """Why `token_id`, its num_tokens-th token, ends it, or None; and the user's stop token id if it was one."""
        may_stop = num_tokens - self.num_prompt_tokens >= self.sampling_params.min_tokens
        if may_stop and token_id in self.stop_token_ids:
            return "stop", None if token_id in self.eos_token_ids else token_id
        if num_tokens >= self.max_total_tokens:
            return "length", None
        return None, None

    def to_started(self) -> StartedRequest:
        """The message to the front end that the request has started in its row."""
        assert self.row is not None
        assert self.first_scheduled_s is not None
        return StartedRequest(
            self.row, self.request_id, self.num_cached_tokens, self.first_scheduled_s, self.num_preemptions
        )

    def to_output(
        self,
        new_token_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: WireError | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: PooledPrompt | None = None,
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_s=self.first_scheduled_s,
            num_preemptions=self.num_preemptions,
            error=error,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
        )

    def check(self) -> None:
        """Asserts the invariants of an unfinished request between two operations of the scheduler."""
        if self.status is RequestStatus.RUNNING:
            assert self.row is not None, "it runs without a row"
            return
        assert self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert self.row is None, "it waits and holds a row"
        assert len(self.tokens) <= self.num_tokens_to_hold < self.max_total_tokens, "slots"


def _needs_whole_prompt(params: SamplingParams) -> bool:
    """Whether every position of the prompt must be computed, for prompt logprobs or the mean of hidden states: these
    come with the first sampled token."""
    return params.prompt_logprobs is not None or params.pooling == "mean"
