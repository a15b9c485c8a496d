"""EngineCore: requests in, tokens out. One owner of the scheduler, the KV cache's bookkeeping and the executor.

    add_request ─▶ Scheduler ─schedule─▶ SchedulerOutput ─▶ Executor ─▶ workers
                       ▲                                                  │
                       └──update── ModelRunnerOutput ◀─────────────────────┘

It runs in the caller's process; `process.py` puts it into one of its own. What it is made of has its owners: the steps
(`steps_in_flight.py`), the workers (`supervisor.py`) and calls to them (`worker_calls.py`), their memory
(`memory_control.py`), grammars (`grammar_gate.py`). Here is what callers have of them, and how they meet.

With `max_worker_restarts` it outlives its workers (`supervisor.py`). All that a request is, its tokens, its seed and
its place in the queue, is in the scheduler, and what a token is depends on these alone; so the requests are computed
again from the tokens they have, and their callers see a pause and the tokens of an undisturbed run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ringcore.config import EngineConfig
from ringcore.engine_core.admin.public_methods import PublicMethods
from ringcore.engine_core.grammar_gate import GrammarGate
from ringcore.engine_core.health import engine_health
from ringcore.engine_core.memory.calls import steps_by_rank, steps_of
from ringcore.engine_core.memory.control import MemoryControl
from ringcore.engine_core.memory.methods import OPERATIONS, MemoryMethods
from ringcore.engine_core.memory.operations import Operation, Operations
from ringcore.engine_core.request_gate import RequestGate
from ringcore.engine_core.steps_in_flight import StepsInFlight
from ringcore.engine_core.supervisor import WorkersLost, WorkerSupervisor
from ringcore.engine_core.worker_calls import WorkerCalls
from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.executor import executor_class
from ringcore.executor.base import EncodedCall, Executor, RpcFuture
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import EngineHealth, EngineRecovering, MemoryReport, PauseMode
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.output_reader import OutputReader, output_columns
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    OutputColumns,
)
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["EngineCore"]


class EngineCore(MemoryMethods):
    """The engine, in this process.

    Raises at construction what stopped it: `ModelLoadError`, `CapacityError`, `ConfigError`, `EngineDeadError`.
    A worker's death or an error in a step costs a restart of the workers; where none is left it ends the engine: that
    call and every later one raise `EngineDeadError`. Not thread-safe: one thread at a time.

    on_recovery: told of each restart before it is made; it must not raise. `ready` is the new workers' afterwards, and
    `wait_fds` gives other descriptors.
    clock: gives seconds; that by which `arrival_s` of requests was taken.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        on_recovery: Callable[[EngineRecovering], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._executor = executor if executor is not None else executor_class(config.parallel.executor)(config)
        self._supervisor = WorkerSupervisor(config, self._executor, on_recovery)
        self._calls = WorkerCalls(self._executor, self._supervisor, self._recover)
        self.public_methods = PublicMethods(EngineCore, lambda: self._executor.methods)
        self._untold: list[EngineCoreOutput] = []  # of no step, for the next `advance` to give out
        self._held: deque[OutputColumns] = deque()  # of steps that were taken while an operation was waited for
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
        )
        depth = config.scheduler.steps_in_flight
        self._steps = StepsInFlight(self._scheduler, self._executor, self._supervisor, depth, clock)
        self._reader = OutputReader()
        self._grammars = GrammarGate(config, self._scheduler, self._calls.compile_grammar, self._untold)
        gate = RequestGate(self._scheduler, self._grammars, self._supervisor, self._steps, self._untold)
        self._memory = MemoryControl(self._calls.submit, gate, config.device.enable_sleep_mode)
        self._operations = Operations(self._hold_a_step)

    # -----------------------------------------------------------------------------------------------------------
    # Requests. They need no workers: while these are lost, requests come and go all the same.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. Raises `InvalidRequestError` (or `CapacityError`) and is unchanged if it is wrong;
        `SleepingError` while the memory that it needs is given back, or the weights are stale.

        What is wrong with a grammar of its `structured_outputs` comes as its output: that is compiled first."""
        self._supervisor.check_alive()
        self._memory.check_takes_requests()
        self._grammars.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends requests at once, also one that a step in flight computes; returns the last output of each.

        Unknown and finished ids are ignored.
        """
        self._supervisor.check_alive()
        ids = list(request_ids)
        return [*self._grammars.abort(ids), *self._scheduler.abort(ids)]

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do: a request that is not finished, unless a pause or a sleep keeps it from
        going on; a step in flight; an operation under way; an output to give.
        """
        is_busy = bool(self._steps or self._untold or self._held or self._operations or self._grammars)
        return is_busy or self._scheduler.has_unfinished

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, and its workers could compute: none is lost, and no memory is away or stale."""
        return not self.has_unfinished and self._memory.states.serves and self._supervisor.lost is None

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_steps_taken(self) -> int:
        """Steps whose results were taken in, or lost with the workers."""
        return self._steps.num_taken

    @property
    def num_steps_launched(self) -> int:
        return self._steps.num_taken + len(self._steps)

    # -----------------------------------------------------------------------------------------------------------
    # The step.

    def step(self, block: bool = True, max_steps: int = 1) -> EngineCoreOutputs:
        """Keeps `steps_in_flight` steps with the workers and takes in the result of the oldest.

        With `block=False` the result is taken in only if it is there. Empty if there is nothing to do, and where it
        took new workers to go on: then the outputs are those of requests that were refused.

        max_steps: where all that run decode and nobody can start, so many steps may be one (see `Scheduler.schedule`).
        """
        columns = self.advance(block, max_steps)
        return EngineCoreOutputs([] if columns is None else self._reader.read(columns), self.stats())

    def advance(self, block: bool = False, max_steps: int = 1) -> OutputColumns | None:
        """`step` for an event loop: None where no result was taken in, so that the loop knows it may sleep.

        Whoever takes columns takes all of them, and reads them in order by one `OutputReader`.
        """
        self._supervisor.check_alive()
        if self._operations:
            self._operations.drive()
        return self._held.popleft() if self._held else self._advance(block, max_steps)

    def _advance(self, block: bool, max_steps: int = 1) -> OutputColumns | None:
        self._supervisor.check_alive()
        with self._supervisor.errors_end_the_engine():
            try:
                self._supervisor.check_serving()
                self._grammars.drive()
                columns = self._steps.take(block, max_steps)
            except WorkersLost:
                self._recover()
                columns = output_columns([], self.stats())
        if self._untold:
            columns = columns or output_columns([], self.stats())
            columns.others[:0] = self._untold
            self._untold.clear()
        if columns is None and block and self._grammars:
            self._grammars.wait(self.wait_fds())
        return columns

    def _recover(self) -> None:
        """New workers in place of the lost ones, and every running request back to the queue."""
        cause = self._supervisor.lost
        assert cause is not None
        with self._supervisor.errors_end_the_engine():
            self.ready, kv_cache = self._supervisor.replace()
            self._untold += self._scheduler.recover(kv_cache, cause, num_executed=len(self._steps))
        self._steps.lose()
        self._grammars.workers_replaced()
        if (steps := self._memory.workers_replaced()) is not None:
            self._operations.submit("recovery", steps, first=True)

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def submit_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> RpcFuture:
        """Broadcasts a call to the workers; it is executed after the steps that are in flight.

        Arguments, values and errors are those of `Executor.submit`, and `WorkerDiedError` where the workers die under
        the call and are replaced: it is not made again, since nobody knows whether it was executed.
        """
        return self.forward_rpc(EncodedCall.of(method, args, kwargs, timeout, unique_reply_rank))

    def forward_rpc(self, call: EncodedCall) -> RpcFuture:
        """`submit_rpc` of a call whose arguments are encoded already. One of `OPERATIONS` the engine does itself.

        Raises `InvalidRequestError` for a method that is not there or that only the engine calls.
        """
        if not call.is_callable:
            self.public_methods.find("workers", call.method)
            if call.method in OPERATIONS:
                return self._submit_by_rank(call)
        return self._calls.forward(call)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Calls an `@rpc` method on every worker; one value a rank, in rank order, or the `unique_reply_rank`'s value.

        Raises as `submit_rpc`'s future: `WorkerError` if it raised there, `RpcTimeoutError` after `timeout` seconds;
        the engine goes on.
        """
        return self.submit_rpc(method, args, kwargs, timeout, unique_reply_rank).result()

    def capture_graph(self) -> RpcFuture:
        """Has every rank capture one of the CUDA graphs that are not there; the value: how many are left, by rank. For
        an engine that `is_idle`."""
        return self._calls.submit("capture_graph")

    def check_workers(self) -> None:
        """Notices a worker that died while nothing was asked of it: raises `EngineDeadError`, or replaces the workers.

        Waits for nothing but the new workers.
        """
        self._calls.check()

    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when a step or a call may have completed, or a worker has died.

        Asking any future takes in the replies of all, and makes them unreadable: see `loop.EngineLoop`. They are
        others after a restart, and from call to call while a grammar is compiled.
        """
        return [*self._calls.wait_fds(), *self._grammars.fds]

    def pause(self, mode: PauseMode = "new") -> None:
        """Until `resume`: with "new" no request starts and those that run go on, with "all" no step is begun.

        Requests come and go all the same. Raises `InvalidRequestError` for another mode.
        """
        self._supervisor.check_alive()
        if mode not in ("new", "all"):
            raise InvalidRequestError(f"mode={mode!r}: give 'new' or 'all'", field="mode", value=repr(mode))
        self._scheduler.pause(mode)

    def resume(self) -> None:
        """Ends a pause; where there is none, nothing happens."""
        self._supervisor.check_alive()
        self._scheduler.resume()

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all cached prefixes. False, and nothing changed, while a request runs; unless those that run are to
        be preempted: they are computed again, from nothing.
        """
        self._supervisor.check_alive()
        return self._scheduler.reset_prefix_cache(preempt_running)

    # -----------------------------------------------------------------------------------------------------------
    # Sleep, wake-up and new weights.

    def submit_operation(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Operation:
        """Asks for one of `OPERATIONS`, done while the engine is driven, by `step`, `advance` or the operation's own
        `result`, which is a `MemoryReport`. Raises `InvalidRequestError` for what is wrong with the arguments.
        """
        self._supervisor.check_alive()
        check_timeout("timeout", timeout)
        return self._operations.submit(name, steps_of(self._memory, name, args, kwargs or {}), timeout)

    def _submit_by_rank(self, call: EncodedCall) -> Operation:
        self._supervisor.check_alive()
        steps = steps_by_rank(self._memory, call, self.config.parallel.tensor_parallel_size)
        return self._operations.submit(call.method, steps, call.timeout, is_by_rank=call.unique_reply_rank is None)

    def _operate(self, name: str, kwargs: Mapping[str, Any], timeout: float | None) -> MemoryReport:
        """Outputs of steps that are taken meanwhile come with the next calls of `step`."""
        report: MemoryReport = self.submit_operation(name, (), kwargs, timeout).result()
        return report

    def _hold_a_step(self) -> None:
        if (columns := self._advance(block=True)) is not None:
            self._held.append(columns)

    @property
    def is_operating(self) -> bool:
        """Whether something is under way that no descriptor may tell of: an operation, or a request whose grammar is
        compiled."""
        return bool(self._operations) or self._grammars.is_working

    def is_sleeping(self) -> bool:
        """Whether it slept and has not wholly woken."""
        return self._memory.states.is_sleeping

    # -----------------------------------------------------------------------------------------------------------
    # How it does.

    def methods(self) -> list[RpcMethod]:
        """What can be called by name: the engine's own methods, and those of its workers."""
        return self.public_methods.listing()

    def stats(self) -> EngineStats:
        """The scheduler's counts."""
        return self._scheduler.stats()

    @property
    def num_restarts(self) -> int:
        """How often the workers were replaced, or were tried to be."""
        return self._supervisor.num_restarts

    def health(self) -> EngineHealth:
        """How the engine and each worker do, without asking the workers anything. Never waits, never raises."""
        return engine_health(
            self._scheduler, self._steps, self._executor, self._supervisor, self._memory.states, self._clock()
        )

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def shutdown(self) -> None:
        """Ends the workers and frees what they held. Idempotent; every later call raises `EngineDeadError`.

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
