"""Moves requests from the waiting queue into the running batch, and sizes their first prefill chunk.

`Starter` tries them in queue order, while the step has token budget left and a row is free. A request that cannot start
keeps its place, and a bounded number may skip ahead of it, which limits head-of-line blocking. It cannot start if

    too few blocks are free                   nothing changes until a request frees blocks
    a running request computes its prefix     tried again in every step, as each result may add blocks of it
    a store has more of its prefix            it is loaded; meanwhile the request is outside the queue
    too little token budget is left           tried again in the next step

While the first is the only reason, no request is tried until the scheduler sets `may_start`: a blocked queue costs a
step nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.config import SchedulerConfig
from ringcore.kv_cache.manager import CachedPrefix
from ringcore.protocol.requests import StartedRequest
from ringcore.scheduler.loading import LoadingRequests
from ringcore.scheduler.planning import is_worth_starting, num_victims_needed
from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.running import RunningRequests
from ringcore.scheduler.step import StepPlan

__all__ = ["Starter"]


class Starter:
    """Admits requests from the queue `waiting` into `running`, and records those that started.

    `clock` gives seconds on the host's monotonic clock.
    """

    def __init__(
        self, config: SchedulerConfig, *, waiting: RequestQueue, running: RunningRequests, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._running = running
        self._clock = clock
        # Whether a request may be able to start that could not when it was last tried.
        self.may_start = False
        self.num_prefix_hit_tokens = 0
        self.num_prefix_query_tokens = 0
        self.loading = LoadingRequests(waiting, running, clock)
        self._starting: list[Request] = []  # in this step
        self._started: list[StartedRequest] = []  # not reported to the front end yet

    @property
    def may_start_next(self) -> bool:
        """Whether a waiting request may start in the step after one in which all decode."""
        # Blocks that leave a sliding window may suffice for a waiting request.
        may_start = self.may_start or self._running.kv_cache.has_windows
        return may_start and self._running.has_free_row

    def start_waiting(self, plan: StepPlan) -> None:
        """Starts requests in queue order; a bounded number may skip ahead of one that lacks blocks."""
        self.may_start = False
        if not self._waiting or not self._running.has_free_row:
            return
        self._running.publish()
        passed: list[Request] = []
        while self._waiting and self._running.has_free_row and (not passed or self._may_skip_ahead(passed)):
            if plan.token_budget == 0:
                self.may_start = True
                break
            request = self._waiting.pop()
            if not self._try_to_start(request, plan):
                if request not in self.loading:
                    passed.append(request)
                continue
            for one in passed:
                one.num_times_passed += 1
        for request in passed:
            self._waiting.add(request)
        self._finish_starts(plan)

    def start(self, request: Request, prefix: CachedPrefix, plan: StepPlan) -> bool:
        """Starts a request that is not in the queue; False, and nothing changed, if too few blocks are free."""
        num_tokens = self._max_chunk_tokens(len(request.tokens) - prefix.num_computed_tokens)
        is_started = self._start(request, prefix, num_tokens, plan)
        self._finish_starts(plan)
        return is_started

    def _start(self, request: Request, prefix: CachedPrefix, num_tokens: int, plan: StepPlan) -> bool:
        """num_tokens: those that it computes, if the budget has so many."""
        num_tokens = min(num_tokens, plan.token_budget)
        if not self._running.start(request, prefix, num_tokens):
            return False
        plan.add_new(num_tokens)
        self._starting.append(request)
        return True

    def _finish_starts(self, plan: StepPlan) -> None:
        plan.new_requests += self._running.finish_starts(self._clock())
        self._started += [request.to_started() for request in self._starting]
        self._starting.clear()

    def num_victims_needed(self, request: Request, victims: Sequence[Request]) -> int:
        """How many of these running requests must be preempted, in their order, for the request to start; 0 also if all
        are too few, or if a running request computes its prefix.
        """
        self._running.publish()
        prefix = self._find_cached_prefix(request)
        if prefix.is_awaited:
            return 0
        rows = [victim.row for victim in victims if victim.row is not None]
        return num_victims_needed(request, prefix, rows, self._running.has_free_row, self._running.kv_cache)

    def take_started(self) -> list[StartedRequest]:
        """The requests that started since the last call."""
        started, self._started = self._started, []
        return started

    def _may_skip_ahead(self, passed: Sequence[Request]) -> bool:
        """passed: those that were tried and cannot start, at least one."""
        limit = self._config.max_skip_ahead
        return len(passed) <= limit and all(request.num_times_passed < limit for request in passed)

    def _try_to_start(self, request: Request, plan: StepPlan) -> bool:
        kv_cache = self._running.kv_cache
        prefix = self._find_cached_prefix(request)
        if prefix.is_awaited:
            self.may_start = True  # every step result may publish more of it
            return False
        if kv_cache.stored is not None and self.loading.begin(request, prefix):
            return False
        num_tokens = self._max_chunk_tokens(len(request.tokens) - prefix.num_computed_tokens)
        if num_tokens > plan.token_budget and not is_worth_starting(plan, self._config.token_budget):
            self.may_start = True
            return False
        if not self._start(request, prefix, num_tokens, plan):
            return False
        if request.num_preemptions == 0 and kv_cache.enable_prefix_caching and not request.needs_whole_prompt:
            self.num_prefix_hit_tokens += prefix.num_computed_tokens
            self.num_prefix_query_tokens += len(request.tokens)
        return True

    def _find_cached_prefix(self, request: Request) -> CachedPrefix:
        """No hit for a request that needs every position of its prompt computed."""
        kv_cache = self._running.kv_cache
        return kv_cache.no_prefix() if request.needs_whole_prompt else kv_cache.find_cached_prefix(request)

    def _max_chunk_tokens(self, num_tokens: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        return num_tokens if threshold is None else min(num_tokens, threshold)
