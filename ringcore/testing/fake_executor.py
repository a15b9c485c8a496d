"""A fake executor for the real engine in tests and simulations: no model, no device, no process.

EngineCore ──SchedulerOutput──▶ FakeExecutor ──▶ FakeWorker: checks it, keeps rows, generates tokens
     ▲                               │
     └───── done when the step's cost has elapsed on the clock; or failed by an injected fault
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError
from ringcore.executor.base import Executor
from ringcore.executor.calls import joined_error
from ringcore.executor.in_process import call_workers, report_of, worker_health
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, check_reply_rank
from ringcore.executor.timing import timed
from ringcore.executor.value_codec import portable_error
from ringcore.executor.wire import STEP_METHOD
from ringcore.executor.worker_proc import create_worker, shut_down
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.testing.alarm import Alarm
from ringcore.testing.clock import HostClock, VirtualClock
from ringcore.testing.fake_futures import StepFuture, Timer
from ringcore.testing.fake_worker import FakeWorker
from ringcore.testing.faults import Fault, check_faults
from ringcore.testing.hardware import Hardware, find_hardware
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepCost
from ringcore.testing.tokens import Script
from ringcore.worker.rpc import rpc_methods

__all__ = ["FakeExecutor"]


class FakeExecutor(Executor):
    """One `FakeWorker` a rank, in the caller's process and thread; the output rank executes the steps.

    It replaces a real executor: `EngineCore(config, FakeExecutor(config, ...), clock=clock.now)`, or by name
    (`executor=FakeExecutor` or "ringcore.testing:FakeExecutor") with all defaults, or as a subclass that passes other
    arguments to this constructor. The model needs only a config.json, with load_format="dummy".

    A step is executed when it is submitted, and done when its cost has elapsed; steps run sequentially. Calls take no
    time. Values and errors are those of the real executors.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokens: Script | None = None,
        clock: VirtualClock | None = None,
        cost: StepCost | None = None,
        faults: Sequence[Fault] = (),
        hardware: str | Hardware = "h200",
        worker_factory: str | None = None,
        speculator: FakeSpeculator | None = None,
    ) -> None:
        """tokens: a function of (tokens so far, position, seed), one completion for every prompt, or completions by
        prompt; by default pseudo-random tokens, from seed and position alone.
        clock: virtual time; None is the host's clock, on which steps really take their cost.
        cost: the cost model of a step; None is 0 s.
        faults: the faults to inject.
        hardware: the device whose memory the KV cache is planned for, a name of `testing.HARDWARE` or a `Hardware`.
        speculator: drafts, for an engine with its `max_gain`; None drafts nothing.
        worker_factory: "module:function", called as (config, rank, None), for custom workers instead of fake ones;
        these then handle tokens, cost and row errors themselves. With device="auto" and without
        max_num_batched_tokens, their `health` must report the "device".

        Raises `ConfigError`.
        """
        super().__init__(config)
        _check_options(config, worker_factory, tokens, cost)
        device = find_hardware(hardware) if isinstance(hardware, str) else hardware
        self._make_worker = (
            partial(FakeWorker, config, hardware=device, script=tokens, speculator=speculator)
            if worker_factory is None
            else lambda rank: create_worker(worker_factory, config, rank, None)
        )
        self._layout, self._cost = config.parallel.layout, cost
        self._faults = check_faults(faults, config.parallel.step_timeout_s)
        is_timed = clock is None and (cost is not None or bool(faults))
        self._timer = Timer(clock or HostClock(), Alarm() if is_timed else None)
        self._workers: list[Any] = []
        self._dead: EngineDeadError | None = EngineDeadError("the workers were not started; call start()")
        self._is_shut = False
        self._forget_steps()
        self._num_calls = 0
        self.num_steps = 0  # submitted steps, across worker restarts
        self.busy_s = 0.0  # their total duration

    def _forget_steps(self) -> None:
        """Invariant: `_pending` holds every future that is not due, oldest first; `_failed` is the step that failed, if
        any: every later step of these workers fails with its error."""
        self._pending: deque[StepFuture] = deque()
        self._failed: StepFuture | None = None
        self._is_killed = False  # whether that step killed the workers

    # -----------------------------------------------------------------------------------------------------------
    # Start and end.

    def start(self) -> dict[str, float]:
        assert not self._workers, "start() was called twice"
        try:
            return self._start()
        except BaseException as error:
            self.shutdown()
            if not isinstance(error, Exception):
                raise
            raise portable_error(error, 0, "create_worker") from error

    def restart(self) -> dict[str, float]:
        if self._is_shut:
            self._check_alive()
        self._end(EngineDeadError("the workers were replaced", process="workers"))
        try:
            return self._start()
        except BaseException as error:
            self._end(EngineDeadError(f"the workers could not be replaced: {error!r}", process="workers"))
            if not isinstance(error, Exception):
                raise
            raise portable_error(error, 0, "create_worker") from error

    def _start(self) -> dict[str, float]:
        phases: dict[str, float] = {}
        with timed(phases, "start_workers"):
            self._workers = [self._make_worker(rank) for rank in range(self._layout.world_size)]
        self.methods = rpc_methods(self._workers[0])
        self._dead, self._num_calls = None, 0
        for method in ("init_device", "load_model"):
            with timed(phases, method):
                self.collective_rpc(method)
        return phases

    def shutdown(self) -> None:
        self._is_shut = True
        self._end(EngineDeadError("the workers were shut down", process="workers"))
        self._timer.close()

    def _end(self, error: EngineDeadError) -> None:
        workers, self._workers = self._workers, []
        self._dead = error
        for future in self._pending:
            if not future.is_due():
                future.fail(error)
        self._forget_steps()
        for worker in workers:
            shut_down(worker)

    def check(self) -> None:
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)
        if self._is_killed and self._failed is not None and self._failed.is_due():
            assert isinstance(self._failed.outcome, RingcoreError)
            raise copy.copy(self._failed.outcome)

    # -----------------------------------------------------------------------------------------------------------
    # Calls.

    def forward(self, call: EncodedCall) -> RpcFuture:
        check_reply_rank(call.unique_reply_rank, self._layout.world_size)
        self._check_alive()
        self._num_calls += 1
        return call_workers(self._workers, call, HostClock().now())

    # -----------------------------------------------------------------------------------------------------------
    # Steps.

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        self._check_alive()
        self.num_steps += scheduler_output.num_steps
        self._num_calls += 1
        while self._pending and self._pending[0].is_due():
            self._pending.popleft()
        now = self._timer.clock.now()
        started_s = max(now, self._pending[-1].end_s) if self._pending else now
        if self._failed is not None:
            future = self._step(started_s, started_s, copy.copy(self._failed.outcome))
        else:
            future = self._execute(scheduler_output, started_s, self._next_fault())
        self.busy_s += future.end_s - started_s
        if not future.is_due():
            self._pending.append(future)
        return future

    def _next_fault(self) -> Fault | None:
        """The next fault due in the steps submitted so far. If several are due in one multi-step message, the others
        happen in the following messages."""
        step = min(self._faults, default=self.num_steps)
        return self._faults.pop(step) if step < self.num_steps else None

    def _execute(self, step: SchedulerOutput, started_s: float, fault: Fault | None) -> StepFuture:
        delay_s = 0.0 if fault is None else fault.seconds
        match fault.kind if fault is not None else None:
            case "death" | "hang" | "error" as kind:
                assert fault is not None
                if kind == "hang":
                    assert self.config.parallel.step_timeout_s is not None
                    delay_s = self.config.parallel.step_timeout_s
                error = self._step_error(self._failure(kind))
                self._is_killed = kind != "error"
                self._failed = self._step(started_s, started_s + delay_s, error)
                return self._failed
        failing_row = None
        if fault is not None and fault.kind == "row_error":
            failing_row = -1 if fault.row is None else fault.row
        try:
            output = self._run(step, failing_row)
        except Exception as error:
            return self._step(started_s, started_s + delay_s, self._step_error(error))
        seconds = 0.0 if self._cost is None else self._cost.run_seconds(self._stepping_worker.last_work, step.num_steps)
        return self._step(started_s, started_s + delay_s + seconds, output)

    def _step(self, started_s: float, end_s: float, outcome: ModelRunnerOutput | RingcoreError) -> StepFuture:
        return StepFuture(self._timer, self._layout.output_rank, started_s, end_s, outcome)

    def _step_error(self, error: Exception) -> RingcoreError:
        rank = self._layout.output_rank
        return joined_error({rank: portable_error(error, rank, STEP_METHOD)})

    def _run(self, step: SchedulerOutput, failing_row: int | None) -> ModelRunnerOutput:
        worker = self._stepping_worker
        is_fake = isinstance(worker, FakeWorker)
        output: ModelRunnerOutput | None
        output = worker.execute(step, failing_row) if is_fake else worker.execute_model(step)
        if output is None:
            raise TypeError("execute_model returned None on the output rank")
        return output

    def _failure(self, kind: str) -> Exception:
        if kind == "error":
            return ArithmeticError("the step failed (injected fault)")
        rank, why = self._layout.output_rank, "was killed by SIGKILL (injected fault)"
        if kind == "hang":
            why = f"hung for step_timeout_s={self.config.parallel.step_timeout_s} and was killed"
        return EngineDeadError(
            f"worker {rank} {why}", process=f"worker {rank}", rank=rank, exit_code=None, signal="SIGKILL", last_log=[]
        )

    @property
    def _stepping_worker(self) -> Any:
        return self._workers[self._layout.output_rank]

    @property
    def worker(self) -> FakeWorker:
        """The output rank's fake worker, whose rows show its progress."""
        worker = self._stepping_worker
        assert isinstance(worker, FakeWorker), "the workers are custom ones"
        return worker

    # -----------------------------------------------------------------------------------------------------------
    # Health and diagnostics.

    def wait_fds(self) -> list[int]:
        self._check_alive()
        return self._timer.fds()

    def pids(self) -> dict[str, int]:
        return {}

    def oldest_step_s(self) -> float | None:
        oldest = next((future for future in self._pending if self._timer.clock.now() < future.end_s), None)
        return None if oldest is None else self._timer.clock.now() - oldest.started_s

    def health(self) -> list[RankHealth]:
        busy_s = self.oldest_step_s()
        method = None if busy_s is None else STEP_METHOD
        return [worker_health(rank, method, busy_s or 0.0, self._num_calls) for rank in range(len(self._workers))]

    def diagnose(self) -> str:
        return report_of(self.health(), "a fake one in this process")


def _check_options(
    config: EngineConfig, worker_factory: str | None, tokens: Script | None, cost: StepCost | None
) -> None:
    extension = config.parallel.worker_extension
    if extension is not None:
        raise ConfigError(
            f"worker_extension={extension!r}: a fake worker takes none; give FakeExecutor a worker_factory",
            option="worker_extension",
            value=extension,
        )
    if worker_factory is not None and not (tokens is None and cost is None):
        raise ConfigError(
            f"worker_factory={worker_factory!r}: workers of your own make their tokens and take their time themselves; "
            "give no tokens and no cost",
            option="worker_factory",
            value=worker_factory,
        )
