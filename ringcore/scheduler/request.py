"""A request as the engine process knows it, from arrival to its last token."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

import numpy as np

from ringcore.kv_cache.block_pool import Block
from ringcore.outputs import FinishReason
from ringcore.protocol import EngineCoreOutput, EngineCoreRequest, NewRequest, TokenLogprobs, WireError, int_array

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue, never run
    RUNNING = "running"  # has a row and blocks
    PREEMPTED = "preempted"  # in the queue again; lost its row and blocks, kept its tokens
    FINISHED = "finished"


class Request:
    """Everything the scheduler knows of one request. Mutable, and only the scheduler and the KV cache manager write it.

    Invariant: num_confirmed_tokens <= num_computed_tokens <= len(tokens) + num_pending.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "blocks",
        "cache_salt",
        "eos_token_ids",
        "epoch",
        "first_scheduled_s",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_tokens_to_hold",
        "priority",
        "request_id",
        "row",
        "sampling_params",
        "seed",
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
        max_total_tokens: int,
        stop_token_ids: list[int],
        seed: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.arrival_s = request.arrival_s
        self.priority = request.priority
        self.cache_salt = request.cache_salt
        self.seed = seed
        self.eos_token_ids = eos_token_ids  # those of `stop_token_ids` that are the model's end of text
        self.stop_token_ids = stop_token_ids  # as NewRequest's: the model's end of text (unless ignored), the user's
        self.num_prompt_tokens = len(tokens)
        self.max_total_tokens = max_total_tokens  # prompt and generated; at so many it has finished

        self.status = RequestStatus.WAITING
        self.tokens = tokens  # array('i'): the prompt, then every generated token that is known
        self.num_computed_tokens = 0  # advances when a step is scheduled
        self.num_confirmed_tokens = 0  # follows when that step's output is taken in
        self.num_pending = 0  # tokens that steps in flight will sample, not known yet
        self.num_tokens_to_hold = len(tokens)  # it is admitted when there are slots for so many
        # A step remembers the epoch of each request in it. A preemption or the end of the request starts a new one,
        # which makes void what is still in flight.
        self.epoch = 0

        self.row: int | None = None
        self.blocks: list[Block] = []
        self.block_hashes: list[bytes] = []  # stay right through a preemption: tokens never change
        self.num_published_blocks = 0

        self.waiting_since_s = request.arrival_s  # for a row: since it arrived, or lost its last one
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it first ran
        self.num_preemptions = 0

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_total_tokens(self) -> int:
        """Known and pending ones: the tokens of its row at the worker once the steps in flight are done."""
        return len(self.tokens) + self.num_pending

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a step may compute now; 0 where the tokens in flight are the last it can have."""
        if self.num_total_tokens >= self.max_total_tokens:
            return 0
        return self.num_total_tokens - self.num_computed_tokens

    def start(self, row: int, num_cached_tokens: int, now_s: float) -> None:
        """Runs, with the tokens of its blocks from the prefix cache counted as computed."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
            self.num_cached_tokens = num_cached_tokens
        self.status = RequestStatus.RUNNING
        self.row = row
        self.num_computed_tokens = self.num_confirmed_tokens = num_cached_tokens

    def preempt(self, now_s: float) -> None:
        """Back to nothing computed. Its known tokens stay, and are computed again as if all were the prompt.

        Pending ones are lost and sampled again. They need their slots all the same: resumed with fewer, it would be
        preempted before the first of them is known, again and again. The last token of all needs none.
        """
        num_tokens = min(self.num_total_tokens, self.max_total_tokens - 1)
        self.num_tokens_to_hold = max(self.num_tokens_to_hold, num_tokens)
        self._leave(RequestStatus.PREEMPTED)
        self.num_preemptions += 1
        self.waiting_since_s = now_s
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_pending = 0

    def move_to_cache(self, max_num_tokens: int) -> None:
        """Another cache, which holds at most `max_num_tokens` tokens, replaces the one that it was admitted to.

        It does not run, and its known tokens fit. What the old cache called its blocks means nothing in the new one.
        """
        assert self.row is None
        self.block_hashes.clear()
        self.max_total_tokens = min(self.max_total_tokens, max_num_tokens + 1)
        self.num_tokens_to_hold = min(self.num_tokens_to_hold, self.max_total_tokens - 1)

    def finish(self) -> None:
        self._leave(RequestStatus.FINISHED)

    def _leave(self, status: RequestStatus) -> None:
        assert not self.blocks, "its blocks are freed first"
        self.status = status
        self.row = None
        self.epoch += 1

    def finish_reason(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Whether the token, just appended, is the last one, and the user's stop token id if that is why."""
        may_stop = self.num_generated_tokens >= self.sampling_params.min_tokens
        if may_stop and token_id in self.stop_token_ids:
            return "stop", None if token_id in self.eos_token_ids else token_id
        if len(self.tokens) >= self.max_total_tokens:
            return "length", None
        return None, None

    def to_new_request(self) -> NewRequest:
        """What the workers need to know of it when it gets a row; nothing of it is in flight then."""
        assert self.row is not None
        assert self.num_pending == 0
        return NewRequest(
            row=self.row,
            token_ids=np.array(self.tokens, dtype=np.int32),  # a copy: a view would keep the array from growing
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=int_array([block.id for block in self.blocks]),
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
        )

    def to_output(
        self,
        new_token_ids: list[int],
        *,
        logprobs: TokenLogprobs | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: WireError | None = None,
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_s=self.first_scheduled_s,
            num_preemptions=self.num_preemptions,
            error=error,
        )

    def check(self) -> None:
        """Asserts what holds of every unfinished request between two operations of the scheduler."""
        assert self.num_confirmed_tokens <= self.num_computed_tokens <= self.num_total_tokens
        assert len(self.tokens) < self.max_total_tokens, "it has all its tokens and is not finished"
        assert self.num_total_tokens <= self.max_total_tokens, "a step in flight samples past its last token"
        if self.status is RequestStatus.RUNNING:
            assert self.row is not None, "it runs without a row"
        else:
            assert self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert self.row is None, "it waits and holds a row"
            assert not self.blocks, "it waits and holds blocks"
            assert self.num_computed_tokens == self.num_pending == 0, "it waits, and something is computed"
