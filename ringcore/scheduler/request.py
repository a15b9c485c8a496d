"""The scheduler's request state. The counters of a running request are columns of `RunningTable`."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from ringcore.kv_cache.block_hash import ExtraKeys
from ringcore.params.outputs import FinishReason
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreRequest,
    PromptLogprobs,
    StartedRequest,
    TokenLogprobs,
    WireError,
)

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the waiting queue, never scheduled
    RUNNING = "running"  # in the running batch: has a row and blocks
    PREEMPTED = "preempted"  # in the waiting queue again; its row and blocks are freed, its tokens kept (recompute)
    FINISHED = "finished"


class Request:
    """The state of one request outside the columns of `RunningTable`. Mutable, and only the scheduler writes it; the KV
    cache manager appends to `block_hashes`.
    """

    __slots__ = (
        "arrival_s",
        "bad_words_token_ids",
        "block_hashes",
        "eos_token_ids",
        "extra_keys",
        "first_scheduled_s",
        "max_total_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_times_skipped",
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
        tokens: array[int],
        *,
        sequence: int,
        max_total_tokens: int,
        stop_token_ids: list[int],
        seed: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.bad_words_token_ids = request.bad_words_token_ids
        self.arrival_s = request.arrival_s
        self.priority = request.priority
        self.sequence = sequence  # arrival number
        self.seed = seed
        self.eos_token_ids = eos_token_ids  # those of `stop_token_ids` that are the model's EOS
        self.stop_token_ids = stop_token_ids  # as NewRequest's: the model's EOS (unless ignored), then the user's
        self.num_prompt_tokens = len(tokens)
        self.max_total_tokens = max_total_tokens  # prompt and output; with so many it is finished

        self.status = RequestStatus.WAITING
        self.tokens = tokens  # array('i'): the prompt, then the output up to its last preemption
        self.num_tokens_to_hold = len(tokens)  # it starts when slots for so many tokens can be allocated
        self.num_times_skipped = 0  # later requests that started before it while it waited (head-of-line skips)

        self.row: int | None = None
        self.run: int | None = None  # run id, unique for each start of any request; that of the last start
        self.num_tokens_when_preempted = 0  # computed by that run, steps in flight included
        self.extra_keys = ExtraKeys(cache_salt=request.cache_salt)
        self.block_hashes: list[bytes] = []  # stay valid across a preemption: tokens are append-only

        self.waiting_since_s = request.arrival_s  # in the queue: since its arrival or its last preemption
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens = 0  # prefix cache hit when it first started
        self.num_preemptions = 0

    def start(self, row: int, run: int, num_cached_tokens: int, now_s: float) -> None:
        """Enters the running batch, with `num_cached_tokens` tokens of the prefix cache counted as computed."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
            self.num_cached_tokens = num_cached_tokens
        self.status = RequestStatus.RUNNING
        self.row, self.run = row, run

    def preempt(self, tokens: array[int], *, num_total_tokens: int, num_computed_tokens: int, now_s: float) -> None:
        """Preemption by recompute: nothing is computed any more. The known `tokens` are kept, and prefilled again like
        a prompt; num_total_tokens also counts the tokens that steps in flight would have sampled.

        Those are dropped and sampled again. `num_tokens_to_hold` includes their slots all the same: resumed with fewer,
        the request could be preempted again before the first of them is known, in a livelock. The very last token needs
        no slot.
        """
        self.tokens = tokens
        num_tokens = min(num_total_tokens, self.max_total_tokens - 1)
        self.num_tokens_to_hold = max(self.num_tokens_to_hold, num_tokens)
        self.num_tokens_when_preempted = num_computed_tokens
        self.num_preemptions += 1
        self.waiting_since_s = now_s
        self.status = RequestStatus.PREEMPTED
        self.row = None

    def move_to_cache(self, max_total_tokens: int) -> None:
        """Adapts to a new cache, in which a request has at most `max_total_tokens`.

        The request is not running, and its known tokens fit. The block hashes of the old cache are invalid.
        """
        assert self.row is None
        self.block_hashes.clear()
        self.max_total_tokens = min(self.max_total_tokens, max_total_tokens)
        self.num_tokens_to_hold = min(self.num_tokens_to_hold, self.max_total_tokens - 1)

    def finish(self) -> None:
        self.status = RequestStatus.FINISHED
        self.row = None

    def finish_reason(self, token_id: int, num_tokens: int) -> tuple[FinishReason | None, int | None]:
        """The finish reason if `token_id`, the num_tokens-th token, is the last; the user's stop token id if any."""
        may_stop = num_tokens - self.num_prompt_tokens >= self.sampling_params.min_tokens
        if may_stop and token_id in self.stop_token_ids:
            return "stop", None if token_id in self.eos_token_ids else token_id
        if num_tokens >= self.max_total_tokens:
            return "length", None
        return None, None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be computed: until its first output token, with which they are sent."""
        return self.sampling_params.prompt_logprobs is not None and len(self.tokens) == self.num_prompt_tokens

    def to_started(self) -> StartedRequest:
        """The front end's notification that the request was given a row."""
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
        )

    def check(self) -> None:
        """Asserts the invariants of an unfinished request between two operations of the scheduler."""
        if self.status is RequestStatus.RUNNING:
            assert self.row is not None, "a running request without a row"
            return
        assert self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert self.row is None, "a waiting request holds a row"
        assert len(self.tokens) <= self.num_tokens_to_hold < self.max_total_tokens, "slots"
