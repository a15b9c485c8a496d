"""Decides what each step computes, and takes in what it sampled.

There are no phases: a step gives every request some number of its tokens that are not computed yet, out of one budget.
A prompt is many such tokens, a completion one at a time, a resumed request's prompt is all it had.

Steps in flight. `schedule` may be called again before `update` took in the step before it. What a step will have done
is then counted as done (`computed`), and a token that it will sample as there (`total`); the worker takes that token
from its own rows. When the step comes back, each row in it is compared by run, and what belongs to a request that was
preempted, aborted or finished since is dropped.

Blocks are freed at once, even those that a step in flight still writes to. That is safe: workers execute steps in
order, so that stray write comes before the first step of the block's new owner, and the owner writes a slot before it
reads it. The prefix cache has only blocks whose tokens are known and whose step has come back, and nothing in flight
writes to those. A freed row is safe for the same reason, once it is reported.

It always drains. While nothing is in flight and a request is unfinished, `schedule` returns a step unless it is paused:
the running request that is the last to be a victim has a token to compute, a budget, and the blocks of all others;
admission saw to it that it never needs more than the whole cache (`Request.max_total_tokens`). Where none runs, all
blocks are free, nobody's prefix is awaited, and the first one waiting fits. Somebody always gets further: the one with
most tokens computed is never preempted for another, and each token sampled stays known. In a quarantine the one on
trial has not reached its target, so it has a token to compute, and its trial ends with the step that reaches it.

Recovery. When the workers die, nothing is lost but work: every token given out is known here. `recover` preempts all
that run, so that they are computed again from these tokens, and the quarantine finds out who is to blame.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ringcore.config import SchedulerConfig
from ringcore.errors import CapacityError, EngineDeadError
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.protocol.messages import PauseMode
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, EngineStats, OutputColumns
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.scheduler.admission import Admission
from ringcore.scheduler.failures import failure, id_in_use, killed_the_workers
from ringcore.scheduler.planning import share_budget, steps_at_once, take_blocks, victims
from ringcore.scheduler.quarantine import Quarantine, trial_targets
from ringcore.scheduler.request import Request, RequestStatus
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.results import take_in
from ringcore.scheduler.running import RunningRequests
from ringcore.scheduler.starting import Starter
from ringcore.scheduler.step import StepInFlight, StepPlan, check_in_flight

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
        eos_token_ids: list[int],
        vocab_size: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._admission = Admission(
            kv_cache=kv_cache,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            seed=seed,
        )
        self._clock = clock
        # Every unfinished request is in `_requests`, and in exactly one of `_running`, `_waiting` and `_quarantine`;
        # only the one on trial both runs and is in the quarantine.
        self._requests: dict[str, Request] = {}
        self._running = RunningRequests(config.max_num_seqs, vocab_size, kv_cache)
        self._table = self._running.table
        self._waiting = RequestQueue(config.scheduling_policy)
        self._quarantine = Quarantine(self._waiting)
        self._starter = Starter(config, waiting=self._waiting, running=self._running, clock=clock)
        self.num_at_gate = 0  # admitted, and not enqueued yet
        self.paused: PauseMode | None = None
        self.is_frozen = False
        self._in_flight: deque[StepInFlight] = deque()
        self._last_version: int | None = None  # of the running table, if the last step had all of it, in its order
        self._num_steps = 0
        self._num_preemptions = 0

    # Requests in and out.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request into the queue. Raises `InvalidRequestError` where it can never be served."""
        self._enqueue(self.admit(request))

    def admit(self, request: EngineCoreRequest) -> Request:
        """A request that somebody else holds until it may be enqueued; in the queue it has the place of its arrival.

        Raises `InvalidRequestError` where it can never be served.
        """
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        return self._admission.admit(request)

    def enqueue(self, admitted: Request) -> None:
        """Raises `CapacityError` where the workers were replaced since it was admitted, and it fits no more."""
        self._admission.readmit(admitted)
        self._enqueue(admitted)

    def _enqueue(self, admitted: Request) -> None:
        self._requests[admitted.request_id] = admitted
        self._waiting.add(admitted)
        self._starter.may_start = True

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends these requests at once; the last output of each that was alive. Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish([request])
                outputs.append(request.to_output([], finish_reason="abort"))
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is not finished that neither a pause nor a freeze keeps from going on."""
        if self.is_frozen:
            return False
        match self.paused:
            case "all":
                return False
            case "new":
                return self._table.num > 0 or self._quarantine.is_open
            case None:
                return bool(self._requests)

    def pause(self, mode: PauseMode) -> None:
        """Until `resume`: with "new" no request starts and those that run go on, with "all" no step is scheduled."""
        self.paused = mode

    def resume(self) -> None:
        self.paused = None
        self._starter.may_start = True

    def freeze(self) -> None:
        """Until `thaw` no step is scheduled, whatever is paused or resumed meanwhile."""
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self._starter.may_start = True

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    # A step.

    def schedule(self, max_steps: int = 1) -> SchedulerOutput | None:
        """The next step; None where there is nothing to compute until a step in flight or a request comes in, or
        `resume` is called.

        Where all that run decode, nothing is in flight and nobody can start, it may be up to `max_steps` steps in one,
        as many as need no decision between them: the same steps as one by one, but that those who stop at a token
        before the last are noticed at the end. Every step returned must be executed, and given to `update` in the same
        order.
        """
        if self.paused == "all" or self.is_frozen:
            return None
        plan = StepPlan(token_budget=self._config.token_budget)
        if self._quarantine.is_open:
            self._schedule_trial(plan)
        else:
            self._quarantine.release()
            if self._config.preempt_lower_priority:
                self._make_room_for_first_waiting()
            self._schedule_running(plan)
            if self._starter.may_start and self.paused is None and not plan.has_preempted:
                self._starter.start_waiting(plan)
        if plan.is_empty:
            assert self._in_flight or self.paused or not self._requests, "unfinished requests, and nothing to wait for"
            return None
        num_steps = 1
        if max_steps > 1 and self._can_repeat(plan):
            kv_cache, depth = self._running.kv_cache, self._config.steps_in_flight
            num_steps = steps_at_once(plan, max_steps, self._table, kv_cache, depth)
        return self._launch(plan, num_steps)

    def update(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> OutputColumns:
        """Takes in the oldest step in flight: what each request gained by it, those that gained nothing left out."""
        step = self._in_flight.popleft()
        assert step.step == scheduler_output.step == model_output.step, "steps come back in the order of scheduling"
        results = take_in(step, model_output, self._table)
        self._table.append_tokens(results.positions, results.token_ids)
        indices, ended, others = results.ends(self._table, self._running.stop_tokens)
        prompt_logprobs = results.prompt_logprobs_without(others) if results.prompt_logprobs else []
        self._finish(ended)
        if self._running.release_windows():
            self._starter.may_start = True
        if self._quarantine.on_trial is not None:
            self._end_trial_at_its_target(self._quarantine.on_trial)
        started = self._starter.take_started()
        return OutputColumns(started, *results.columns_without(indices), others, self.stats(), prompt_logprobs)

    # What goes into it.

    def _schedule_running(self, plan: StepPlan) -> None:
        """Gives each its share of the budget, oldest first, and the blocks for it; preempts where there are too few."""
        table = self._table
        while table.num:
            share_budget(plan, table, self._config.long_prefill_token_threshold)
            if take_blocks(plan, table, self._running.kv_cache):
                break
            self._preempt(int(self._victims()[0]))
            plan.has_preempted = True
        plan.num_running = table.num
        plan.token_budget -= table.num if plan.counts is None else int(plan.counts.sum())

    def _victims(self) -> np.ndarray:
        return victims(self._table, by_priority=self._config.scheduling_policy == "priority")

    def _make_room_for_first_waiting(self) -> None:
        """Preempts those of worse priority, if that lets the first one waiting start."""
        if not self._waiting or self.paused is not None:
            return
        first, table = self._waiting.peek(), self._table
        lower = [table.request_at(at) for at in self._victims() if table.priority[at] > first.priority]
        if not lower:
            return
        for request in lower[: self._starter.num_victims_needed(first, lower)]:
            self._preempt(table.position_of(request))

    def _schedule_trial(self, plan: StepPlan) -> None:
        """Gives the suspect on trial what it can compute up to its target, and nobody else anything.

        It takes nothing from the prefix cache, where others have put what they computed: it computes all of it itself.
        """
        suspect = self._quarantine.on_trial
        if suspect is None and self._in_flight:
            return  # what one that was aborted left in flight must not be laid to another's charge
        trial = suspect or self._quarantine.begin_trial()
        num_computed = 0 if suspect is None else int(self._table.computed[0])
        plan.token_budget = min(plan.token_budget, self._quarantine.num_tokens_left(num_computed))
        if suspect is not None:
            self._schedule_running(plan)
            return
        assert self._starter.start(trial, self._running.kv_cache.no_prefix(), plan), (
            "it has the cache to itself, and does not fit"
        )

    def _can_repeat(self, plan: StepPlan) -> bool:
        """Whether all decode, and will in the next step too, whatever this one comes to but for stop tokens."""
        if not plan.decodes_all or self._in_flight or self._quarantine.is_open:
            return False
        if not self._waiting or self.paused is not None:
            return True
        if self._config.preempt_lower_priority:
            return False  # what a victim would free grows from step to step
        return not self._starter.may_start_next

    def _launch(self, plan: StepPlan, num_steps: int) -> SchedulerOutput:
        step = plan.launch(self._num_steps, num_steps, self._table)
        repeats_rows = plan.decodes_all and step.version == self._last_version
        output = plan.to_output(step, self._running.finished_rows, repeats_rows)
        self._running.finished_rows.clear()
        self._in_flight.append(step)
        self._last_version = step.version
        self._num_steps += num_steps
        return output

    # What becomes of a request.

    def _preempt(self, position: int) -> None:
        self._quarantine.take_back(self._running.preempt(position, self._clock()))
        self._num_preemptions += 1
        self._starter.may_start = True

    def _preempt_all(self) -> None:
        while self._table.num:
            self._preempt(self._table.num - 1)
        self._quarantine.interrupt_trial()

    def _end_trial_at_its_target(self, suspect: Request) -> None:
        position = self._table.position_of(suspect)
        if self._quarantine.clear(int(self._table.confirmed[position])) is not None:
            self._preempt(position)

    def _finish(self, requests: Sequence[Request]) -> None:
        """Ends these, whether they run or wait."""
        self._running.stop([request for request in requests if request.status is RequestStatus.RUNNING])
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request.request_id)
            self._quarantine.discard(request)
            request.finish()
            del self._requests[request.request_id]
            self._starter.may_start = True

    # The workers died.

    def recover(self, kv_cache: KVCacheManager, cause: EngineDeadError, num_executed: int) -> list[EngineCoreOutput]:
        """Goes on with new workers, which know no row, and an empty cache, which may be of another size.

        The workers before them died of `cause`. Of the steps in flight, which are forgotten, they were given the oldest
        `num_executed`; who had a share in one of these is a suspect. Every request keeps its tokens and its place.
        Returns the last outputs of requests that end here: one that killed the workers on trial (`WorkerDiedError`),
        and those whose tokens the new cache can never hold (`CapacityError`).
        """
        on_trial = self._quarantine.on_trial
        targets = trial_targets(list(self._in_flight), num_executed, self._requests.values(), self._table)
        self._forget_the_workers(kv_cache)
        outputs = []
        if on_trial is not None and on_trial.request_id in targets:
            outputs.append(failure(on_trial, killed_the_workers(on_trial, cause)))
            self._finish([on_trial])
        for request in list(self._requests.values()):
            try:
                self._admission.readmit(request)
            except CapacityError as error:
                outputs.append(failure(request, error))
                self._finish([request])
        if not self._quarantine.is_open:
            self._quarantine.release()
            self._quarantine.open({id_: target for id_, target in targets.items() if id_ in self._requests})
        return outputs

    def _forget_the_workers(self, kv_cache: KVCacheManager) -> None:
        self._preempt_all()
        self._in_flight.clear()
        self._last_version = None
        self._running.change_workers(kv_cache)
        self._admission.change_cache(kv_cache)

    # The state as a whole.

    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._num_steps,
            num_running=self._table.num,
            num_waiting=len(self._requests) - self._table.num + self.num_at_gate,
            num_free_blocks=self._running.kv_cache.num_free_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_hit_tokens=self._starter.num_prefix_hit_tokens,
            num_prefix_query_tokens=self._starter.num_prefix_query_tokens,
            is_sleeping=self.is_frozen,
        )

    def oldest_waiting_s(self, now_s: float) -> float | None:
        """Seconds that the request that waits longest for a row has waited, since it came or lost its last one."""
        since = [request.waiting_since_s for request in self._requests.values() if request.row is None]
        return max(now_s - min(since), 0.0) if since else None

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets every cached prefix. While a request runs: False, and nothing done, unless those that run are to be
        preempted, and computed again from nothing.
        """
        if preempt_running:
            self._preempt_all()
        return self._running.kv_cache.reset_prefix_cache()

    def check(self) -> None:
        """Recomputes every derived count and asserts every invariant; for tests, after any operation."""
        self._running.check()
        owners = {request.request_id: request for request in self._table.in_order()}
        waiting = {request.request_id: request for request in self._waiting}
        held = {id_: request for id_, request in self._requests.items() if request in self._quarantine}
        assert len(held) == len(self._quarantine), "the quarantine holds one that is finished"
        assert not waiting.keys() & (owners.keys() | held.keys()), "one that waits runs, or is in quarantine"
        assert {**waiting, **owners, **held} == self._requests, "a request is lost, or left over"
        for request in self._requests.values():
            request.check()
            assert (request.status is RequestStatus.RUNNING) == (request.request_id in owners)
        in_flight = {run for step in self._in_flight for run, _ in step.tokens_by_run()}
        unfinished = {request.run for request in self._requests.values() if request.run is not None}
        self._quarantine.check(self._table, in_flight & unfinished)
        check_in_flight(self._in_flight, self._table, self._config.token_budget)
