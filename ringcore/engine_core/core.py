"""EngineCore: requests in, tokens out. It owns the scheduler, the KV cache's bookkeeping and the executor.

    add_request ─▶ Scheduler ─schedule─▶ SchedulerOutput ─▶ Executor ─▶ workers
                       ▲                                                  │
                       └──update── ModelRunnerOutput ◀─────────────────────┘

It runs in the caller's process; `process.py` runs it in an engine process. Each part has its own module: steps in
flight (`steps_in_flight.py`), the workers (`supervisor.py`) and calls to them (`worker_calls.py`), their memory
(`memory/control.py`), grammars (`grammar_gate.py`). This module has the public methods and connects the parts.

With `max_worker_restarts` the engine survives the loss of its workers (`supervisor.py`). The scheduler holds all state
of a request (tokens, seed, queue position), and a sampled token depends on that state alone. So the new workers
recompute the requests from the tokens they have; callers see a pause, then the tokens of an undisturbed run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.admin.operator_calls import OperatorCalls
from ringcore.engine_core.admin.public_methods import PublicMethods, engine_method
from ringcore.engine_core.expert_balance import ExpertBalance
from ringcore.engine_core.grammar_gate import GrammarGate
from ringcore.engine_core.health import engine_health
from ringcore.engine_core.kv_loads import KVLoads
from ringcore.engine_core.memory.calls import by_rank, decoded_operation
from ringcore.engine_core.memory.control import MemoryControl
from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.engine_core.memory.operations import Operation, Operations
from ringcore.engine_core.request_gate import RequestGate
from ringcore.engine_core.steps_in_flight import StepsInFlight
from ringcore.engine_core.supervisor import WorkersLost, WorkerSupervisor
from ringcore.engine_core.tracing import EngineTracing
from ringcore.engine_core.worker_calls import WorkerCalls
from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.executor import executor_class
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, RpcSubmitter, WorkerCall
from ringcore.metrics import StepMetrics
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import EngineHealth, EngineRecovering, MemoryReport, PauseMode
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.operations import OPERATIONS, MemoryOperation, operation_name
from ringcore.protocol.output_reader import OutputReader, output_columns
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    OutputColumns,
)
from ringcore.scheduler.admission import MaxGain
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["EngineCore"]


class EngineCore(RpcSubmitter, MemoryMethods):
    """The engine, in this process.

    The constructor raises what failed: `ModelLoadError`, `CapacityError`, `ConfigError`, `EngineDeadError`.
    A worker's death or an error in a step costs one restart of the workers; once no restart is left, that call and
    every later one raise `EngineDeadError`. Not thread-safe: one thread at a time.

    on_recovery: called before each restart; it must not raise. After a restart `ready` describes the new workers, and
    `wait_fds` returns other descriptors.
    clock: returns seconds; the clock of the requests' `arrival_s`. max_gain: the most that a request gains in a step;
    None: as `speculative` says.
    tracing: its `to_front_end` is set by who has a channel to one.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        on_recovery: Callable[[EngineRecovering], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_gain: MaxGain | None = None,
    ) -> None:
        self._clock = clock
        self._executor = executor if executor is not None else executor_class(config.parallel.executor)(config)
        self.tracing = EngineTracing()
        self._executor.tracer = self.tracing.tracer
        self._supervisor = WorkerSupervisor(config, self._executor, on_recovery)
        self._calls = WorkerCalls(self._executor, self._supervisor, self._recover)
        self.public_methods = PublicMethods(EngineCore, lambda: self._executor.methods)
        self._pending_outputs: list[EngineCoreOutput] = []  # that no step produced; the next `advance` returns them
        self._buffered: deque[OutputColumns] = deque()  # of steps that completed while `_operate` waited
        try:
            self.ready, kv_cache = self._supervisor.start()
        except BaseException:
            self._executor.shutdown()
            raise
        self.config = config = self._supervisor.config
        self._scheduler = Scheduler(
            config.scheduler,
            kv_cache=kv_cache,
            eos_token_ids=config.model.spec.eos_token_ids,
            vocab_size=config.model.spec.vocab_size,
            seed=config.model.seed,
            clock=clock,
            max_gain=max_gain,
        )
        parts_of_steps = self._scheduler, self._executor, self._supervisor
        self._steps = StepsInFlight(*parts_of_steps, config.scheduler, clock, self.tracing)
        self._reader = OutputReader()
        self._grammars = GrammarGate(config, self._scheduler, self._calls.compile_grammar, self._pending_outputs)
        self._kv_loads = KVLoads(self._scheduler, self._calls.submit, self._steps)
        gate = RequestGate(self._scheduler, self._grammars, self._supervisor, self._steps, self._pending_outputs)
        self._memory = MemoryControl(self._calls.submit, gate, config.device.enable_sleep_mode)
        self._operations = Operations(self._buffer_step)
        of_experts = self._calls.submit, self._operations, self._memory.states, gate, lambda: self._steps.num_completed
        self._experts = ExpertBalance(config.parallel, *of_experts)
        self.note_send = self._steps.note_send
        parts = self._scheduler, self._steps.times, self._steps.drafts, self._grammars, self._pending_outputs
        self._operator_calls = OperatorCalls(self, *parts, clock)

    # -----------------------------------------------------------------------------------------------------------
    # Requests. These methods need no workers, so they also work while the workers are lost.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. Raises `InvalidRequestError` (or `CapacityError`) for an invalid one and leaves the engine
        unchanged; `SleepingError` while weights or KV cache are released, or the weights are stale.

        A grammar of `structured_outputs` is compiled first; its error arrives as the request's output."""
        self._supervisor.check_alive()
        self._memory.check_takes_requests()
        if self.tracing.tracer.is_on:
            self.tracing.note_arrival(request.request_id, request.arrival_s, request.num_prompt_tokens)
        self._grammars.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends requests at once, including those that a step in flight computes; returns the last output of each.

        Unknown and finished ids are ignored.
        """
        self._supervisor.check_alive()
        ids = list(request_ids)
        return [*self._grammars.abort(ids), *self._scheduler.abort(ids)]

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work: an unfinished request that no pause or sleep blocks, a step in flight, an operation
        in progress, or a pending output.
        """
        is_busy = bool(self._steps or self._pending_outputs or self._buffered or self._operations or self._grammars)
        return is_busy or self._scheduler.has_unfinished

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no work and its workers could compute: none is lost, all memory is resident and
        current."""
        return not self.has_unfinished and self._memory.states.serves and self._supervisor.lost is None

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_steps_completed(self) -> int:
        """Steps whose results the scheduler has applied, or that were lost with the workers."""
        return self._steps.num_completed

    @property
    def num_steps_launched(self) -> int:
        return self._steps.num_completed + len(self._steps)

    # -----------------------------------------------------------------------------------------------------------
    # The step.

    def step(self, block: bool = True, max_steps: int = 1) -> EngineCoreOutputs:
        """Keeps `max_steps_in_flight` steps with the workers and applies the model's output of the oldest.

        With `block=False` it applies the output only if that has arrived. Empty if there is no work. After a restart of
        the workers it has the outputs of the requests that the recovery ended, and no tokens.

        max_steps: if all running requests decode and no waiting one can start, one step may stand for up to this many
            (see `Scheduler.schedule`).
        """
        columns = self.advance(block, max_steps)
        return EngineCoreOutputs([] if columns is None else self._reader.read(columns), self.stats())

    def advance(self, block: bool = False, max_steps: int = 1) -> OutputColumns | None:
        """`step` for an event loop: None if no result was applied, so that the loop may block in poll.

        The caller must consume every `OutputColumns`, in order, with one `OutputReader`.
        """
        self._supervisor.check_alive()
        self._experts.drive()
        if self._operations:
            self._operations.drive()
        return self._buffered.popleft() if self._buffered else self._advance(block, max_steps)

    def _advance(self, block: bool, max_steps: int = 1) -> OutputColumns | None:
        self._supervisor.check_alive()
        with self._supervisor.errors_end_the_engine():
            try:
                self._supervisor.check_serving()
                self._grammars.drive()
                if self._scheduler.store is not None:
                    self._kv_loads.drive()
                columns = self._steps.advance(block, max_steps)
            except WorkersLost:
                self._recover()
                columns = output_columns([], self.stats())
        if self._pending_outputs:
            columns = columns or output_columns([], self.stats())
            columns.others[:0] = self._pending_outputs
            self._pending_outputs.clear()
        if columns is None and block and (self._grammars or self._kv_loads):
            self._grammars.wait(self.wait_fds())
        return columns

    def _recover(self) -> None:
        """Replaces the lost workers and preempts every running request."""
        cause = self._supervisor.lost
        assert cause is not None
        with self._supervisor.errors_end_the_engine():
            self.ready, kv_cache = self._supervisor.replace()
            self._pending_outputs += self._scheduler.recover(kv_cache, cause, num_executed=len(self._steps))
        self._steps.discard_lost()
        self._grammars.workers_replaced()
        self._kv_loads.workers_replaced()
        if (steps := self._memory.workers_replaced()) is not None:
            self._operations.submit("recovery", steps, first=True)

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def submit(self, call: WorkerCall) -> RpcFuture:
        """Its future raises `WorkerDiedError` if the workers die during the call and are replaced: the engine does not
        retry it, since the workers may have executed it."""
        return self.forward_rpc(call.encoded())

    def forward_rpc(self, call: EncodedCall) -> RpcFuture:
        """`submit` of a call whose arguments are encoded already. The engine executes `OPERATIONS` itself.

        Raises `InvalidRequestError` for an unknown method and for one that only the engine may call.
        """
        if not call.is_callable:
            self.public_methods.find("workers", call.method)
            if call.method in OPERATIONS:
                return self._submit_by_rank(call)
        return self._calls.forward(call)

    def capture_graph(self) -> RpcFuture:
        """Has every rank capture one of its missing CUDA graphs; the value: how many are left, by rank. For an engine
        that `is_idle`."""
        return self._calls.submit("capture_graph")

    def check_workers(self) -> None:
        """Detects a worker that died while idle: raises `EngineDeadError`, or replaces the workers.

        Blocks only while new workers start.
        """
        self._calls.check()

    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when a step or a call may have completed, or a worker has died.

        Checking any future drains the replies of all, which makes the descriptors unreadable again: see
        `loop.EngineLoop`. The list changes after a restart, and between calls while a grammar compiles.
        """
        return [*self._calls.wait_fds(), *self._grammars.fds]

    def pause(self, mode: PauseMode = "new") -> None:
        """Until `resume`: with "new" no waiting request starts and running ones continue, with "all" no step starts.

        Requests can still be added and aborted. Raises `InvalidRequestError` for another mode.
        """
        self._supervisor.check_alive()
        if mode not in ("new", "all"):
            raise InvalidRequestError(f"mode={mode!r}: give 'new' or 'all'", field="mode", value=repr(mode))
        self._scheduler.pause(mode)

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        self._supervisor.check_alive()
        self._scheduler.resume()

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Evicts the whole prefix cache, and what a store has. Returns False and changes nothing while requests run,
        unless `preempt_running` preempts them (by recompute).
        """
        self._supervisor.check_alive()
        is_empty = self._scheduler.reset_prefix_cache(preempt_running)
        if is_empty and self._scheduler.store is not None:
            self._scheduler.store.clear()
        return is_empty

    # -----------------------------------------------------------------------------------------------------------
    # Sleep, wake-up and new weights.

    def submit_operation(self, operation: MemoryOperation, timeout: float | None = None) -> Operation:
        """Queues a sleep, wake-up or weight update, whose fields are checked already (`checked_operation`). `step`,
        `advance` and the operation's own `result` drive it; the result is a `MemoryReport`. Raises
        `InvalidRequestError`.
        """
        self._supervisor.check_alive()
        check_timeout("timeout", timeout)
        return self._operations.submit(operation_name(operation), self._memory.steps(operation), timeout)

    def _submit_by_rank(self, call: EncodedCall) -> Operation:
        self._supervisor.check_alive()
        steps = self._memory.steps(decoded_operation(call.method, call.parts))
        steps = by_rank(steps, call, self.config.parallel.layout.world_size)
        return self._operations.submit(call.method, steps, call.timeout_s, is_by_rank=call.unique_reply_rank is None)

    def _operate(self, operation: MemoryOperation, timeout: float | None) -> MemoryReport:
        """The next calls of `step` return the outputs of steps that complete meanwhile."""
        report: MemoryReport = self.submit_operation(operation, timeout).result()
        return report

    def _buffer_step(self) -> None:
        if (columns := self._advance(block=True)) is not None:
            self._buffered.append(columns)

    @property
    def is_operating(self) -> bool:
        """Whether work is in progress whose completion may signal no descriptor: an operation, or a grammar that
        compiles, or a load from a store."""
        return bool(self._operations or self._kv_loads) or self._grammars.is_working

    @property
    def is_frozen(self) -> bool:
        """Whether no step may be scheduled: `EngineStats.is_sleeping`."""
        return self._scheduler.is_frozen

    def is_sleeping(self) -> bool:
        """Whether some memory has not been woken since the last sleep."""
        return self._memory.states.is_sleeping

    # -----------------------------------------------------------------------------------------------------------
    # Introspection.

    def methods(self) -> list[RpcMethod]:
        """The methods that can be called by name: the engine's own, and those of its workers."""
        return self.public_methods.listing()

    def engine_call(self, name: str) -> Callable[..., Any]:
        """The method that a call to the engine itself names, if it returns at once. Raises `InvalidRequestError`."""
        return engine_method(name, self, self._operator_calls)

    def stats(self) -> EngineStats:
        """The scheduler's counts."""
        return self._scheduler.stats()

    def step_metrics(self) -> StepMetrics:
        """Histograms of the steps since the first call."""
        steps, stored_kv, experts = self._steps, self._kv_loads.stats(), self._experts.stats()
        of_parts = {"stored_kv": stored_kv, "experts": experts, "drafts": steps.drafts.stats()}
        return msgspec.structs.replace(steps.times.metrics(), **of_parts)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the workers, failed attempts included."""
        return self._supervisor.num_restarts

    def health(self) -> EngineHealth:
        """The state of the engine and of each worker, read without a call to the workers. Never waits, never raises."""
        states, num_blocks, now = self._memory.states, self.ready.num_blocks, self._clock()
        return engine_health(self._scheduler, self._steps, self._executor, self._supervisor, states, num_blocks, now)

    def start_trace(self, seconds: float) -> None:
        """Records what this process and the front end do, for `seconds` at most (see `ringcore.tracing`). Workers have
        a `start_trace` of their own. Raises `InvalidRequestError` while another trace is recorded."""
        self.tracing.start(seconds, self._scheduler.unfinished())

    def stop_trace(self) -> bytes:
        """Ends the trace; -> the `tracing.ProcessTrace` of this process, encoded."""
        return self.tracing.stop()

    def front_end_trace(self) -> bytes | None:
        """After `stop_trace`: that of the front end, once it has answered; it may never."""
        return self.tracing.front_end()

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    def shutdown(self) -> None:
        """Ends the workers and frees their resources. Idempotent; every later call raises `EngineDeadError`.

        Does nothing in a process that was forked from this one, where every other call raises `RingcoreError`.
        """
        if not self._supervisor.owner.is_here:
            return
        self._supervisor.end(EngineDeadError("the engine was shut down", process="engine"))
        self._steps.clear()
        self._grammars.close()
        self._executor.shutdown()

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
