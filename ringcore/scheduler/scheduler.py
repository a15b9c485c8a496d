"""Decides what each step computes, and takes in what it sampled.

There are no phases: a step gives every request some number of its tokens that are not computed yet, out of one budget.
A prompt is many such tokens, a completion one at a time, a resumed request's prompt is all it had.

Steps in flight. `schedule` may be called again before `update` took in the step before it. What a step will have done
is then counted as done (`num_computed_tokens`), a token that it will sample as pending; the worker takes that token
from its own rows. When the step comes back, each request in it is compared by epoch, and what belongs to a request that
was preempted, aborted or finished since is dropped.

Blocks are freed at once, even those that a step in flight still writes to. That is safe: workers execute steps in
order, so that stray write comes before the first step of the block's new owner, and the owner writes a slot before it
reads it. The prefix cache has only blocks whose tokens are known and whose step has come back, and nothing in flight
writes to those (see `KVCacheManager.publish`). A freed row is safe for the same reason, once it is reported.

It always drains. While nothing is in flight and a request is unfinished, `schedule` returns a step: the oldest running
request has a token to compute, a budget, and the blocks of all younger ones; admission saw to it that it never needs
more than the whole cache (`Request.max_total_tokens`). Where none runs, all blocks are free and the first one waiting
fits. In a quarantine the one on trial is the oldest running request; it has not reached its target, so it has a token
to compute, and its trial ends with the step that reaches it.

Recovery. When the workers die, nothing is lost but work: every token given out is known here. `recover` preempts all
that run, so that they are computed again from these tokens, and the quarantine finds out who is to blame.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable

from ringcore.config import SchedulerConfig
from ringcore.errors import CapacityError, EngineDeadError, InvalidRequestError, RingcoreError, error_to_wire
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineStats,
    ModelRunnerOutput,
    SchedulerOutput,
    WireError,
)
from ringcore.scheduler.admission import Admission
from ringcore.scheduler.failures import killed_the_workers, row_failed
from ringcore.scheduler.quarantine import Quarantine
from ringcore.scheduler.request import Request, RequestStatus
from ringcore.scheduler.request_queue import FCFSQueue, RequestQueue
from ringcore.scheduler.step import StepInFlight, StepPlan, tokens_reached

__all__ = ["Scheduler"]


class Scheduler:
    """The requests of one engine: those that run, in the order of admission, those that wait, and those in quarantine.

    `kv_cache` is the scheduler's alone. `clock` gives seconds on the host's monotonic clock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        kv_cache: KVCacheManager,
        max_model_len: int,
        eos_token_ids: list[int],
        vocab_size: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._admission = Admission(
            kv_cache=kv_cache,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            seed=seed,
        )
        self._clock = clock
        # Every unfinished request is in `_requests`, and in exactly one of `_running`, `_waiting` and `_quarantine`;
        # only the one on trial both runs and is in the quarantine.
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # the newest last
        self._waiting: RequestQueue = FCFSQueue()
        self._quarantine = Quarantine(self._waiting)
        # Every row belongs to one running request or is in the heap `_free_rows`; the worker has yet to be told of
        # those in `_finished_rows`.
        self._free_rows = list(range(config.max_num_seqs))
        self._finished_rows: list[int] = []
        self._in_flight: deque[StepInFlight] = deque()
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prefix_hit_tokens = 0
        self._num_prefix_query_tokens = 0

    # Requests in and out.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request at the end of the queue. Raises `InvalidRequestError` where it can never be served."""
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id={request.request_id!r}: a request with this id is not finished yet; give another id",
                field="request_id",
                value=request.request_id,
            )
        admitted = self._admission.admit(request)
        self._requests[admitted.request_id] = admitted
        self._waiting.add(admitted)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends these requests at once; the last output of each that was alive. Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request)
                outputs.append(request.to_output([], finish_reason="abort"))
        return outputs

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # A step.

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None where there is nothing to compute until a step in flight or a request comes in.

        Every step returned must be executed, and given to `update` in the same order.
        """
        plan = StepPlan(token_budget=self._config.max_num_batched_tokens)
        if self._quarantine.is_open:
            self._schedule_trial(plan)
        else:
            self._quarantine.release()
            self._schedule_running(plan)
            self._schedule_waiting(plan)
        if not plan.shares:
            assert self._in_flight or not self._requests, "unfinished requests, and nothing to wait for"
            return None
        return self._launch(plan)

    def update(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Takes in the oldest step in flight: what each request gained by it, those that gained nothing left out."""
        step, shares = self._in_flight.popleft()
        assert step == scheduler_output.step == model_output.step, "steps come back in the order of their scheduling"
        sampled = {row: i for i, row in enumerate(model_output.rows.tolist())}
        errors = {error.row: error.message for error in model_output.row_errors}
        outputs = []
        for share in shares:
            if share.is_void:
                continue
            if share.row in errors:
                outputs.append(self._fail(share.request, row_failed(share.request, errors[share.row])))
                continue
            share.request.num_confirmed_tokens = share.num_computed_tokens
            if share.samples:
                assert share.row in sampled, f"step {step}: the workers left out row {share.row}, which samples"
                outputs.append(self._append(share.request, model_output, sampled[share.row]))
            else:
                self._kv_cache.publish(share.request)
        if self._quarantine.is_open and (cleared := self._quarantine.clear()) is not None:
            self._preempt(cleared)
        return outputs

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in list(self._running.values()):
            if plan.token_budget == 0 or request.status is not RequestStatus.RUNNING:
                break  # the newest are preempted first, so whoever comes after a preempted one is preempted too
            num_tokens = self._num_tokens_now(request, plan)
            if num_tokens == 0:
                continue
            block_ids = self._allocate_or_preempt(request, num_tokens)
            if block_ids is None:
                break
            plan.append_blocks(request, block_ids)
            plan.add(request, num_tokens)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for the request, taken from the newest running ones if need be; None where it is itself the newest."""
        while (block_ids := self._kv_cache.allocate(request, num_tokens)) is None:
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Admits in order, up to the first request that has to wait on.

        All tokens that a request comes with get their blocks at once: a prompt admitted on the room for its first chunk
        alone could run out of blocks half way, and its work be lost.
        """
        while self._waiting and self._free_rows and plan.token_budget > 0:
            request = self._waiting.peek()
            cached_blocks, num_cached_tokens = self._kv_cache.find_cached_prefix(request)
            num_tokens = request.num_tokens_to_hold - num_cached_tokens
            if self._kv_cache.allocate(request, num_tokens, cached_blocks) is None:
                break
            self._waiting.pop()
            if request.first_scheduled_s is None and self._kv_cache.enable_prefix_caching:
                self._num_prefix_hit_tokens += num_cached_tokens
                self._num_prefix_query_tokens += len(request.tokens)
            self._start(request, num_cached_tokens, plan)

    def _start(self, request: Request, num_cached_tokens: int, plan: StepPlan) -> None:
        """Lets a request run that was given its blocks."""
        request.start(heapq.heappop(self._free_rows), num_cached_tokens, self._clock())
        self._running[request.request_id] = request
        plan.new_requests.append(request.to_new_request())
        plan.add(request, self._num_tokens_now(request, plan))

    def _schedule_trial(self, plan: StepPlan) -> None:
        """Gives the suspect on trial what it can compute up to its target, and nobody else anything.

        It takes nothing from the prefix cache, where others have put what they computed: it computes all of it itself.
        """
        suspect = self._quarantine.on_trial
        if suspect is None and self._in_flight:
            return  # what one that was aborted left in flight must not be laid to another's charge
        trial = suspect or self._quarantine.begin_trial()
        plan.token_budget = min(plan.token_budget, self._quarantine.num_tokens_left)
        if suspect is not None:
            self._schedule_running(plan)
            return
        blocks = self._kv_cache.allocate(trial, trial.num_tokens_to_hold)
        assert blocks is not None, "it has the cache to itself, and does not fit"
        self._start(trial, 0, plan)

    def _num_tokens_now(self, request: Request, plan: StepPlan) -> int:
        num_tokens = min(request.num_tokens_to_compute, plan.token_budget)
        threshold = self._config.long_prefill_token_threshold
        return num_tokens if threshold is None else min(num_tokens, threshold)

    def _launch(self, plan: StepPlan) -> SchedulerOutput:
        output = plan.to_output(self._num_steps, self._finished_rows)
        self._finished_rows.clear()
        self._in_flight.append(StepInFlight(output.step, plan.shares))
        self._num_steps += 1
        return output

    # What becomes of a request.

    def _append(self, request: Request, model_output: ModelRunnerOutput, index: int) -> EngineCoreOutput:
        token_id = int(model_output.token_ids[index])
        request.tokens.append(token_id)
        request.num_pending -= 1
        self._kv_cache.publish(request)
        finish_reason, stop_reason = request.finish_reason(token_id)
        if finish_reason is not None:
            self._finish(request)
        logprobs = model_output.logprobs[index] if model_output.logprobs is not None else None
        return request.to_output([token_id], logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason)

    def _fail(self, request: Request, error: RingcoreError) -> EngineCoreOutput:
        """Ends one request that cannot go on; the others do."""
        self._finish(request)
        return request.to_output([], finish_reason="error", error=WireError(**error_to_wire(error)))

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.preempt(self._clock())
        self._num_preemptions += 1
        self._quarantine.take_back(request)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif request not in self._quarantine:
            self._waiting.remove(request.request_id)
        self._quarantine.discard(request)
        request.finish()
        del self._requests[request.request_id]

    def _stop_running(self, request: Request) -> None:
        assert request.row is not None
        del self._running[request.request_id]
        self._kv_cache.free(request)
        heapq.heappush(self._free_rows, request.row)
        self._finished_rows.append(request.row)

    # The workers died.

    def recover(self, kv_cache: KVCacheManager, cause: EngineDeadError, num_executed: int) -> list[EngineCoreOutput]:
        """Goes on with new workers, which know no row, and an empty cache, which may be of another size.

        The workers before them died of `cause`. Of the steps in flight, which are forgotten, they were given the oldest
        `num_executed`; who had a share in one of these is a suspect. Every request keeps its tokens and its place.
        Returns the last outputs of requests that end here: one that killed the workers on trial (`WorkerDiedError`),
        and those whose tokens the new cache can never hold (`CapacityError`).
        """
        targets = tokens_reached(list(self._in_flight)[:num_executed])
        on_trial = self._quarantine.on_trial
        self._forget_the_workers(kv_cache)
        outputs = []
        if on_trial is not None and on_trial.request_id in targets:
            outputs.append(self._fail(on_trial, killed_the_workers(on_trial, cause)))
        for request in list(self._requests.values()):
            try:
                self._admission.readmit(request)
            except CapacityError as error:
                outputs.append(self._fail(request, error))
        if not self._quarantine.is_open:
            self._quarantine.release()
            self._quarantine.open({id_: target for id_, target in targets.items() if id_ in self._requests})
        return outputs

    def _forget_the_workers(self, kv_cache: KVCacheManager) -> None:
        for request in reversed(list(self._running.values())):  # the oldest last: it comes to stand in front
            self._preempt(request)
        self._quarantine.interrupt_trial()
        self._in_flight.clear()
        self._finished_rows.clear()
        self._kv_cache = kv_cache
        self._admission.change_cache(kv_cache)

    # The state as a whole.

    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._num_steps,
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
            num_prefix_query_tokens=self._num_prefix_query_tokens,
        )

    def oldest_waiting_s(self, now_s: float) -> float | None:
        """Seconds that the request that waits longest for a row has waited, since it came or lost its last one."""
        since = [request.waiting_since_s for request in self._requests.values() if request.row is None]
        return max(now_s - min(since), 0.0) if since else None

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while a request runs."""
        return self._kv_cache.reset_prefix_cache()

    def check(self) -> None:
        """Recomputes every derived count and asserts every invariant; for tests, after any operation."""
        waiting = {request.request_id: request for request in self._waiting}
        assert len(waiting) == len(self._waiting), "the queue holds a request twice"
        assert not waiting.keys() & self._running.keys(), "a request both runs and waits"
        held = {id_: request for id_, request in self._requests.items() if request in self._quarantine}
        assert len(held) == len(self._quarantine), "the quarantine holds one that is finished"
        assert not waiting.keys() & held.keys(), "a request both waits and is in quarantine"
        assert {**waiting, **self._running, **held} == self._requests, "a request is lost, or left over"
        self._quarantine.check(self._running, tokens_reached(self._in_flight).keys())
        for request in self._requests.values():
            request.check()
        for request in self._running.values():
            self._check_running(request)
        rows = [request.row for request in self._running.values() if request.row is not None]
        assert sorted(rows + self._free_rows) == list(range(self._config.max_num_seqs)), "a row is lost, or twice"
        assert len(set(self._finished_rows)) == len(self._finished_rows), "a row is to be reported twice"
        for step in self._in_flight:
            step.check(self._config.max_num_batched_tokens)
        self._kv_cache.check(self._requests.values())

    def _check_running(self, request: Request) -> None:
        assert request.status is RequestStatus.RUNNING, f"{request.status} among the running"
        live = [s for _, shares in self._in_flight for s in shares if s.request is request and not s.is_void]
        assert request.num_pending == sum(share.samples for share in live), "pending tokens that no step will bring"
        num_in_flight = sum(share.num_tokens for share in live)
        assert request.num_confirmed_tokens + num_in_flight == request.num_computed_tokens
