"""Starts waiting requests: moves them from the waiting queue into the running batch, with their first prefill chunk.

Requests are tried in queue order, while token budget is left and a row is free. A request that cannot start keeps its
place, and a bounded number of later requests may skip ahead of it (against head-of-line blocking). It waits because

    too few blocks are free                 until blocks are freed
    a running request computes its prefix   retried in every step: each completed step may publish more of it
    too little token budget is left         retried in the next step

While the first is the only reason, no request is tried until the scheduler sets `may_start` (blocks freed, a new
request): a blocked queue costs nothing per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.config import SchedulerConfig
from ringcore.kv_cache.manager import CachedPrefix
from ringcore.protocol.requests import StartedRequest
from ringcore.scheduler.planning import is_worth_starting, num_victims_needed
from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.running import RunningRequests
from ringcore.scheduler.step import StepPlan

__all__ = ["WaitingScheduler"]


class WaitingScheduler:
    """Moves requests from the queue `waiting` into `running`, and records which started.

    `clock` gives seconds on the host's monotonic clock.
    """

    def __init__(
        self, config: SchedulerConfig, *, waiting: RequestQueue, running: RunningRequests, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._running = running
        self._clock = clock
        # Whether a request may be able to start that could not when the queue was last tried.
        self.may_start = False
        self.num_prefix_hit_tokens = 0
        self.num_prefix_query_tokens = 0
        self._started: list[StartedRequest] = []  # not reported to the front end yet

    @property
    def may_start_next(self) -> bool:
        """Whether a waiting request may start in the step after a pure decode step."""
        # Blocks that slide out of windows are freed and may let a request start.
        may_start = self.may_start or self._running.kv_cache.has_windows
        return may_start and self._running.has_free_row

    def start_waiting(self, plan: StepPlan) -> None:
        """Starts requests in queue order; at most `max_skip_ahead` requests skip ahead of one that cannot start."""
        self.may_start = False
        if not self._waiting or not self._running.has_free_row:
            return
        self._running.publish()
        skipped: list[Request] = []
        while self._waiting and self._running.has_free_row and self._may_skip(skipped):
            if plan.token_budget == 0:
                self.may_start = True
                break
            request = self._waiting.pop()
            if not self._try_to_start(request, plan):
                skipped.append(request)
                continue
            for one in skipped:
                one.num_times_skipped += 1
        for request in skipped:
            self._waiting.add(request)

    def start(self, request: Request, prefix: CachedPrefix, plan: StepPlan) -> bool:
        """Starts a request that is not in the queue; False, with no change, if too few blocks are free."""
        num_left = len(request.tokens) - prefix.num_computed_tokens
        num_tokens = min(self._most_in_one_step(num_left), plan.token_budget)
        new_request = self._running.start(request, prefix, num_tokens, self._clock())
        if new_request is None:
            return False
        plan.add_new(new_request, num_tokens)
        self._started.append(request.to_started())
        return True

    def num_victims_needed(self, request: Request, victims: Sequence[Request]) -> int:
        """How many of the running requests `victims`, in order, must be preempted for the request to start; 0 also if
        preempting all is not enough, or if it waits for a prefix that a running request computes.
        """
        self._running.publish()
        prefix = self._find_cached_prefix(request)
        if prefix.is_awaited:
            return 0
        rows = [victim.row for victim in victims if victim.row is not None]
        return num_victims_needed(request, prefix, rows, self._running.has_free_row, self._running.kv_cache)

    def take_started(self) -> list[StartedRequest]:
        """The requests started since the last call."""
        started, self._started = self._started, []
        return started

    def _may_skip(self, skipped: Sequence[Request]) -> bool:
        limit = self._config.max_skip_ahead
        return len(skipped) <= limit and all(request.num_times_skipped < limit for request in skipped)

    def _try_to_start(self, request: Request, plan: StepPlan) -> bool:
        kv_cache = self._running.kv_cache
        prefix = self._find_cached_prefix(request)
        if prefix.is_awaited:
            self.may_start = True  # every completed step may publish more of the prefix
            return False
        num_tokens = self._most_in_one_step(len(request.tokens) - prefix.num_computed_tokens)
        if not is_worth_starting(plan, num_tokens, self._config.token_budget):
            self.may_start = True
            return False
        if not self.start(request, prefix, plan):
            return False
        if request.num_preemptions == 0 and kv_cache.enable_prefix_caching and not request.wants_prompt_logprobs:
            self.num_prefix_hit_tokens += prefix.num_computed_tokens
            self.num_prefix_query_tokens += len(request.tokens)
        return True

    def _find_cached_prefix(self, request: Request) -> CachedPrefix:
        """The prefix cache hit; none for a request with prompt logprobs: these need every position computed."""
        kv_cache = self._running.kv_cache
        return kv_cache.no_prefix() if request.wants_prompt_logprobs else kv_cache.find_cached_prefix(request)

    def _most_in_one_step(self, num_tokens: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        return num_tokens if threshold is None else min(num_tokens, threshold)
