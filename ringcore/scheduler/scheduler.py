"""Continuous batching: decides what each step computes, and applies what it sampled.

There are no prefill and decode phases: a step gives every request some of its uncomputed tokens, out of one token
budget. A prompt is many such tokens (chunked prefill where the budget is smaller), a completion one at a time; the
prompt of a request preempted by recompute is all tokens that it had.

Async scheduling, with steps in flight. `schedule` may be called again before `update` has applied the previous step. A
step's tokens then count as computed (`computed`), and the token that it will sample as existing (`total`); the worker
reads that token from its own rows. When the step's output arrives, each of its rows is compared by run, and results of
requests that were preempted, aborted or finished since are dropped.

Speculative decoding. A request may gain several tokens in a step (`planning.add_drafts`), and how many is known with
the step's output. Until then it counts as having gained the most that it may: `computed` and `total` are upper bounds,
by which blocks are allocated and its length is limited; `update` lowers them to the truth. It may be in the next step
meanwhile: the worker's own rows know where it is. Slots of rejected drafts are written again before they are read.

Blocks are freed at once, even those that a step in flight still writes to. That is safe: workers execute steps in
order, so that stray write precedes the first step of the block's new owner, and the owner writes a slot before it reads
it. The prefix cache has only blocks whose tokens are known and whose step has come back, and no step in flight writes
to those. A freed row is safe for the same reason, once it is reported.

The scheduler always drains. While no step and no load is in flight and a request is unfinished, `schedule` returns a
step unless it is paused: the last running request in preemption order has a token to compute, a budget, and the blocks
of all others; admission ensures that it never needs more than the whole cache (`Request.max_total_tokens`). If no
request runs, all blocks are free, no prefix is awaited, and the first waiting request fits. Some request always makes
progress: the one with the most computed tokens is never preempted for another, and each sampled token stays known. In a
quarantine the suspect on trial has not reached its target, so it has a token to compute; its trial ends with the step
that reaches it.

Recovery. When the workers die, only computed work is lost: every token sent out is known here. `recover` preempts all
running requests, which are computed again from these tokens, and the quarantine finds the request that kills workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from ringcore.config import SchedulerConfig
from ringcore.errors import CapacityError, EngineDeadError
from ringcore.kv_cache.block_store import BlockStore
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.protocol.messages import PauseMode
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, EngineStats, OutputColumns
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.scheduler.admission import Admission, MaxGain, at_most
from ringcore.scheduler.failures import failure, id_in_use, poison_request
from ringcore.scheduler.planning import (
    add_drafts,
    allocate_blocks,
    divide_token_budget,
    preemption_order,
    steps_at_once,
)
from ringcore.scheduler.quarantine import Quarantine, trial_targets
from ringcore.scheduler.request import Request, RequestStatus
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.results import apply_output
from ringcore.scheduler.running import RunningRequests
from ringcore.scheduler.starting import Starter
from ringcore.scheduler.step import StepInFlight, StepPlan, check_in_flight, with_transfers
from ringcore.scheduler.turns import Turns
from ringcore.scheduler.view import SchedulerView

__all__ = ["Scheduler"]


class Scheduler:
    """The requests of one engine: the running batch, in the order of admission, the waiting queue, and the quarantine.

    Only the scheduler uses `kv_cache`. `clock` gives seconds on the host's monotonic clock. view: for those who ask.
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
        max_gain: MaxGain | None = None,
    ) -> None:
        self._config, self._lookahead = config, config.lookahead
        self._admission = Admission(
            kv_cache=kv_cache,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            seed=seed,
            max_gain=max_gain or at_most(config.max_gain),
        )
        self._clock = clock
        # Every unfinished request is in `_requests`, and in exactly one of `_running`, `_waiting`, `loading` and
        # `_quarantine`; only the suspect on trial is both running and in the quarantine.
        self._requests: dict[str, Request] = {}
        self._running = RunningRequests(config.max_num_seqs, vocab_size, kv_cache)
        self._table = self._running.table
        self._waiting = RequestQueue(config.scheduling_policy)
        self._quarantine = Quarantine(self._waiting)
        self._starter = Starter(config, waiting=self._waiting, running=self._running, clock=clock)
        self.loading = self._starter.loading
        self._turns = None if config.num_stages == 1 else Turns(config.num_stages, config.steps_of_a_stage)
        self.num_at_gate = 0  # admitted, and not enqueued yet
        self.paused: PauseMode | None = None
        self.is_frozen = False
        self._in_flight: deque[StepInFlight] = deque()
        self._last_version: int | None = None  # of the running table, if the last step had all of it, in its order
        self._num_steps = 0
        self._num_preemptions = 0
        self.view = SchedulerView(self._requests, self._running, self._quarantine, self.loading)

    # Requests in and out.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request into the waiting queue. Raises `InvalidRequestError` if it can never be served."""
        self._enqueue(self.admit(request))

    def admit(self, request: EngineCoreRequest) -> Request:
        """Validates a request that the caller holds until `enqueue`; in the queue it gets the place of its arrival.

        Raises `InvalidRequestError` if it can never be served.
        """
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        return self._admission.admit(request)

    def enqueue(self, admitted: Request) -> None:
        """Raises `CapacityError` if the workers were replaced since its admission and the new cache is too small."""
        self._admission.readmit(admitted)
        self._enqueue(admitted)

    def _enqueue(self, admitted: Request) -> None:
        self._requests[admitted.request_id] = admitted
        self._waiting.add(admitted)
        self._starter.may_start = True

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends these requests at once; returns the last output of each unfinished one. Ignores unknown ids."""
        outputs = []
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish([request])
                outputs.append(request.to_output([], finish_reason="abort"))
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether an unfinished request may still be scheduled: neither a pause nor a freeze holds it."""
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
        """Until `resume`: "new" stops admission and the running batch continues, "all" stops scheduling."""
        self.paused = mode

    def resume(self) -> None:
        self.paused = None
        self._starter.may_start = True

    def freeze(self) -> None:
        """Stops scheduling until `thaw`, regardless of `pause` and `resume` meanwhile."""
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self._starter.may_start = True

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def unfinished(self) -> list[tuple[Request, int]]:
        """The unfinished requests, each with the number of its tokens, those of its prompt among them."""
        table, requests = self._table, self._requests.values()
        running = {id(one): int(table.known[table.position_of(one)]) for one in requests if one.row is not None}
        return [(one, running.get(id(one), len(one.tokens))) for one in requests]

    # A step.

    def schedule(self, max_steps: int = 1) -> SchedulerOutput | None:
        """The next step; None if there is nothing to compute until a step in flight returns, a request arrives, or
        `resume` is called.

        Multi-step: if all running requests decode, no step is in flight and no request can start, it may be up to
        `max_steps` steps in one, as many as need no decision between them. They equal single steps, except that a stop
        token before the last step is noticed at the end. Every step returned must be executed, and given to `update` in
        the same order.
        """
        if self.paused == "all" or self.is_frozen:
            return None
        plan = StepPlan(token_budget=self._config.token_budget)
        if self._quarantine.is_open:
            self._schedule_trial(plan)
        else:
            self._quarantine.release()
            if self._config.preempt_lower_priority:
                self._preempt_for_first_waiting()
            self._schedule_running(plan)
            if self._starter.may_start and self.paused is None and not plan.has_preempted:
                self._starter.start_waiting(plan)
        if plan.is_empty:
            if self.store is None or not self.store.has_transfers:
                is_held = self._in_flight or self.paused or self.loading.in_flight or not self._requests
                assert is_held, "unfinished requests, and nothing to wait for"
                return None
            plan.schedule_nothing()
        if self._table.has_drafts:
            kv_cache = self._running.kv_cache
            add_drafts(plan, self._table, kv_cache, self._config.max_row_tokens, self._lookahead)
        num_steps = 1
        if max_steps > 1 and self._can_repeat(plan):
            kv_cache, depth = self._running.kv_cache, self._config.max_steps_in_flight
            num_steps = steps_at_once(plan, max_steps, self._table, kv_cache, depth)
        return self._launch(plan, num_steps)

    def update(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> OutputColumns:
        """Applies the output of the oldest step in flight; returns the new tokens of the requests that got any."""
        step = self._in_flight.popleft()
        assert step.step == scheduler_output.step == model_output.step, "steps come back in the order of scheduling"
        results = apply_output(step, model_output, self._table)
        indices, ended, others = results.ends(self._table, self._running.stop_tokens)
        prompt_logprobs, pooled = results.prompts_without(others)
        if ended:
            self._finish(ended)
        if self._running.release_windows():
            self._starter.may_start = True
        if self._quarantine.on_trial is not None:
            self._end_trial_at_its_target(self._quarantine.on_trial)
        left, started = results.without(indices), self._starter.take_started()
        columns = started, left.rows, left.token_ids, left.logprobs, others, self.stats(), prompt_logprobs
        return OutputColumns(*columns, left.spans.counts, pooled)

    # The parts of a step.

    def _schedule_running(self, plan: StepPlan) -> None:
        """Gives running requests tokens of the budget and blocks for them, oldest first; preempts if blocks run out."""
        table = self._table
        left_out = None if self._turns is None else partial(self._turns.left_out, self._num_steps)
        while table.num:
            divide_token_budget(plan, table, self._config.long_prefill_token_threshold, left_out)
            if allocate_blocks(plan, table, self._running.kv_cache):
                break
            self._preempt(int(self._preemption_order()[0]))
            plan.has_preempted = True
        else:  # none runs, or the last one was preempted: loads hold the blocks that it needs
            plan.positions = plan.counts = None
        plan.num_running = table.num
        plan.token_budget -= table.num if plan.counts is None else int(plan.counts.sum())

    def _preemption_order(self) -> np.ndarray:
        return preemption_order(self._table, by_priority=self._config.scheduling_policy == "priority")

    def _preempt_for_first_waiting(self) -> None:
        """Preempts running requests of worse priority, if the head of the waiting queue can then start."""
        if not self._waiting or self.paused is not None:
            return
        first, table = self._waiting.peek(), self._table
        lower = [table.request_at(at) for at in self._preemption_order() if table.priority[at] > first.priority]
        if not lower:
            return
        for request in lower[: self._starter.num_victims_needed(first, lower)]:
            self._preempt(table.position_of(request))

    def _schedule_trial(self, plan: StepPlan) -> None:
        """Schedules the suspect on trial alone, up to its target.

        It takes no prefix cache hits, which other requests computed: it computes all of its tokens itself.
        """
        suspect = self._quarantine.on_trial
        if suspect is None and self._in_flight:
            return  # the step of an aborted suspect must not be blamed on the next one
        trial = suspect or self._quarantine.begin_trial()
        num_computed = 0 if suspect is None else int(self._table.computed[0])
        plan.token_budget = min(plan.token_budget, self._quarantine.num_tokens_left(num_computed))
        if suspect is not None:
            self._schedule_running(plan)
            return
        assert self._starter.start(trial, self._running.kv_cache.no_prefix(), plan), (
            "the suspect has the whole cache, and does not fit"
        )

    def _can_repeat(self, plan: StepPlan) -> bool:
        """Whether all running requests decode, in this step and, except for stop tokens, in the next one too."""
        if (
            not plan.decodes_all
            or self._table.has_drafts
            or self._in_flight
            or self._quarantine.is_open
            or self.loading
        ):
            return False
        if not self._waiting or self.paused is not None:
            return True
        if self._config.preempt_lower_priority:
            return False  # the blocks that a victim would free grow with every step
        return not self._starter.may_start_next

    def _launch(self, plan: StepPlan, num_steps: int) -> SchedulerOutput:
        step = plan.launch(self._num_steps, num_steps, self._table)
        repeats_rows = plan.decodes_all and step.version == self._last_version
        output = plan.to_output(step, self._running.finished_rows, repeats_rows)
        if (store := self._running.kv_cache.store) is not None:
            output = with_transfers(output, store.take_transfers())
        self._running.finished_rows.clear()
        self._in_flight.append(step)
        self._last_version = step.version
        self._num_steps += num_steps
        return output

    def finish_load(self, load: int, is_loaded: Sequence[bool]) -> None:
        self.loading.finish(load, is_loaded)
        self._starter.may_start = True

    # Preemption and end of requests.

    def _preempt(self, position: int) -> None:
        self._quarantine.requeue(self._running.preempt(position, self._clock()))
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
        """Ends these requests, running or waiting."""
        self._running.stop([request for request in requests if request.status is RequestStatus.RUNNING])
        may_be_held, self._starter.may_start = len(self._quarantine) > 0, True
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                if request in self._waiting:
                    self._waiting.remove(request.request_id)
                self.loading.discard(request)
            if may_be_held:
                self._quarantine.discard(request)
            request.finish()
            del self._requests[request.request_id]

    # The workers died.

    def recover(self, kv_cache: KVCacheManager, cause: EngineDeadError, num_executed: int) -> list[EngineCoreOutput]:
        """Continues with new workers, which have no rows, and an empty cache, which may have another size.

        The old workers died of `cause`. They had received the oldest `num_executed` of the steps in flight, which are
        dropped; every request with tokens in one of these is a suspect. All requests keep their tokens and their place.
        Returns the last outputs of requests that end here: one that killed the workers on trial (`WorkerDiedError`),
        and those whose tokens the new cache can never hold (`CapacityError`).
        """
        on_trial = self._quarantine.on_trial
        targets = trial_targets(list(self._in_flight), num_executed, self._requests.values(), self._table)
        self._switch_workers(kv_cache)
        outputs = []
        if on_trial is not None and on_trial.request_id in targets:
            outputs.append(failure(on_trial, poison_request(on_trial, cause)))
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

    def _switch_workers(self, kv_cache: KVCacheManager) -> None:
        self._preempt_all()
        self.loading.release_all()
        self._starter.may_start = True
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

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Evicts every cached prefix. While a request runs: False, and nothing done, unless `preempt_running` first
        preempts the running requests by recompute.
        """
        if preempt_running:
            self._preempt_all()
        return self._running.kv_cache.reset_prefix_cache()

    @property
    def store(self) -> BlockStore | None:
        """What keeps blocks beyond the device."""
        return self._running.kv_cache.store

    def check(self) -> None:
        """Recomputes every derived count and asserts every invariant; for tests, after any operation."""
        self._running.check()
        owners = {request.request_id: request for request in self._table.in_order()}
        waiting = {request.request_id: request for request in self._waiting}
        loading = self.loading.check()
        held = {id_: request for id_, request in self._requests.items() if request in self._quarantine}
        assert len(held) == len(self._quarantine), "the quarantine holds a finished request"
        assert not waiting.keys() & (owners.keys() | held.keys() | loading.keys()), "a waiting request is elsewhere too"
        assert not loading.keys() & (owners.keys() | held.keys()), "a loading request runs, or is in quarantine"
        assert {**waiting, **owners, **held, **loading} == self._requests, "a request is lost, or left over"
        for request in self._requests.values():
            request.check()
            assert (request.status is RequestStatus.RUNNING) == (request.request_id in owners)
        in_flight = {run for step in self._in_flight for run, _ in step.tokens_by_run()}
        unfinished = {request.run for request in self._requests.values() if request.run is not None}
        self._quarantine.check(self._table, in_flight & unfinished)
        check_in_flight(self._in_flight, self._table, self._config.token_budget)
