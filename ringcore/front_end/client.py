"""The client of an engine process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from types import TracebackType
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.engine_core.transport.channel import Received, StreamClosed
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.callables import callable_name
from ringcore.executor.rpc_call import WorkerCall, check_reply_rank
from ringcore.executor.value_codec import decode_value
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.engine_caller import EngineCaller
from ringcore.front_end.mailbox import Mailbox
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.request_state import error_of
from ringcore.host.os_limits import os_limit_errors
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    EngineHealth,
    EngineReady,
    HealthState,
    MemoryReport,
    Operate,
    PauseMode,
    RpcCall,
    RpcResult,
)
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.operations import FinishWeightUpdate, MemoryOperation, ReloadWeights, operation_name
from ringcore.protocol.requests import EngineCoreOutputs, EngineCoreRequest, EngineStats
from ringcore.protocol.wire_errors import callables_refused
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import SUBMIT

__all__ = ["EngineCoreClient", "values_of"]

_START_TIMEOUT_S = 1800.0
_RECEIVER_EXIT_S = 10.0
_REPLY_GRACE_S = 2.0  # after the call's deadline, which the engine itself enforces unless it hangs
_TOKENS_PER_MESSAGE = 1 << 16
_REQUESTS_PER_MESSAGE = 256


class EngineCoreClient(EngineCaller, MemoryMethods):
    """Starts an engine process and communicates with it. Every wait ends on a message, the engine's death, or a
    deadline.

    The constructor returns while the engine is starting; `wait_ready` (or `ready`) waits for it. Thread-safe: the first
    thread that waits receives for all of them.

    Once the engine has died, every pending and later call raises the same error: the error of a failed start-up as
    itself (`ModelLoadError`, `CapacityError`, ...), any other cause as `EngineDeadError`. An engine that replaces dead
    workers (`max_worker_restarts`) stays alive: only the calls in flight on the workers raise `WorkerDiedError`.

    In a process that was forked from this one every call raises `RingcoreError`, except `close`, which does nothing.

    observers: of the messages; the owner may add some at any time.
    """

    def __init__(
        self,
        config: EngineConfig,
        observers: Sequence[FrontEndObserver] = (),
        *,
        start_timeout_s: float = _START_TIMEOUT_S,
        tracer: Tracer | None = None,
        connection: EngineConnection | None = None,
    ) -> None:
        """tracer: of this process, where others record with it. connection: of an engine process that has been started,
        which this owns then; None starts one, whatever `start_from` says (see `client_start`)."""
        check_timeout("start_timeout_s", start_timeout_s)
        self.observers = observers
        self._parallel = config.parallel
        self._start_timeout_s = start_timeout_s
        self._start_deadline = time.monotonic() + start_timeout_s
        with os_limit_errors("the engine cannot be started"):
            self._connection = connection or EngineConnection(config)
        self.owner = self._connection.owner
        self._finalizer = weakref.finalize(self, self._connection.close)  # also when dropped, and at exit
        self._call_ids = count()
        self.num_weight_updates = 0  # that this client has finished
        self.tracer = Tracer() if tracer is None else tracer
        self._mailbox = Mailbox(self._connection, self.tracer, observers)

    def begin_waking(self, operations: Sequence[MemoryOperation], ready: EngineReady, began_s: float) -> None:
        """Has an adopted engine wake up, without waiting for it: its start-up ends with the last answer, and `ready` is
        its report. began_s: when its adoption began, monotonic."""
        calls = {next(self._call_ids): operation for operation in operations}
        self._mailbox.be_ready_after(calls.keys(), ready, began_s)
        for call_id, operation in calls.items():
            self._send(Operate(call_id, operation, None))

    # -----------------------------------------------------------------------------------------------------------
    # Requests and their outputs.

    def wait_ready(self) -> EngineReady:
        """Waits for the end of start-up and returns its report; raises the error that ended it."""
        self.owner.check()
        ready = self._mailbox.wait_for(lambda: self._mailbox.ready, self._start_deadline)
        if ready is None:
            error = EngineDeadError(f"the engine was not ready within {self._start_timeout_s} s", process="engine")
            self._mailbox.mark_dead(error)
            self.close()
            raise error
        return ready

    @property
    def ready(self) -> EngineReady:
        """The engine's report of its start, or of its last recovery."""
        self.owner.check()
        self._mailbox.receive()
        return self.wait_ready()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends requests; the engine answers an invalid one with an output that has an error."""
        for batch in _batches(requests):
            began = self.tracer.is_on and now_ns()
            self._send(AddRequests(batch))
            if began:
                self.tracer.note(SUBMIT, began, now_ns(), len(batch), [one.request_id for one in batch])

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; each unfinished one gets a last output with finish reason "abort"."""
        self._send(AbortRequests(list(request_ids)))

    def get_outputs(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The engine's next outputs, in order. After `timeout` seconds: no outputs, and the last known stats."""
        self.owner.check()
        check_timeout("timeout", timeout)
        outputs = self._mailbox.take_outputs(_deadline(timeout))
        return outputs if outputs is not None else EngineCoreOutputs([], self._mailbox.stats)

    @property
    def is_alive(self) -> bool:
        """False once the client has noticed the engine's death, or has closed it."""
        return self._mailbox.dead is None

    @property
    def last_ready(self) -> EngineReady | None:
        """`ready`, without a wait; None if it has not come yet, and once the engine is known to be dead."""
        return self._mailbox.ready if self.is_alive else None

    @property
    def num_worker_restarts(self) -> int:
        return 0 if self._mailbox.recovery is None else self._mailbox.recovery.num_restarts

    @property
    def stats(self) -> EngineStats:
        """As the engine last reported them. A dead engine has no running or waiting requests."""
        return self._mailbox.stats

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def call_workers(self, call: WorkerCall) -> Any:
        check_reply_rank(call.unique_reply_rank, self._parallel.layout.world_size)
        if callable(call.method) and not self._parallel.allow_callables:
            raise callables_refused(callable_name(call.method))
        return super().call_workers(call)

    def _operate(self, operation: MemoryOperation, timeout: float | None) -> MemoryReport:
        check_timeout("timeout", timeout)
        message = Operate(next(self._call_ids), operation, timeout)
        (value,) = self._answer(message, (), operation_name(operation))
        self.num_weight_updates += isinstance(operation, FinishWeightUpdate | ReloadWeights)
        return msgspec.convert(value, MemoryReport)

    def methods(self) -> list[RpcMethod]:
        """`EngineCore.methods`."""
        return msgspec.convert(self.call_engine("methods"), list[RpcMethod])

    def is_sleeping(self, timeout: float | None = None) -> bool:
        return bool(self.call_engine("is_sleeping", timeout=timeout))

    def pause(self, mode: PauseMode = "new", timeout: float | None = None) -> None:
        """`EngineCore.pause`."""
        self.call_engine("pause", (mode,), timeout=timeout)

    def resume(self, timeout: float | None = None) -> None:
        """`EngineCore.resume`."""
        self.call_engine("resume", timeout=timeout)

    def reset_prefix_cache(self, preempt_running: bool = False, timeout: float | None = None) -> bool:
        """`EngineCore.reset_prefix_cache`."""
        return bool(self.call_engine("reset_prefix_cache", (preempt_running,), timeout=timeout))

    def health(self, timeout: float = 1.0) -> EngineHealth:
        """The engine's health, within about `timeout` seconds. Never raises for an engine that is dead or silent.

        "starting": not ready yet, or replacing dead workers (see `restart_cause`). "stalled": the engine process does
        not answer, and `error` has its process state and stacks; or it answers that a step or call takes too long.
        "dead": `error` is the cause.
        """
        self.owner.check()
        check_timeout("timeout", timeout)
        mailbox, error = self._mailbox, None
        mailbox.receive()
        try:
            if mailbox.ready is not None and not mailbox.is_recovering:
                message = RpcCall(next(self._call_ids), "engine", "health")
                answer = self._exchange(message, (), _deadline(timeout), lambda: mailbox.is_recovering)
                if answer is not None:
                    return msgspec.convert(values_of(*answer, "health")[0], EngineHealth)
        except RingcoreError as failure:
            error = failure.message
        if mailbox.dead is not None:
            return self._known_health("dead", mailbox.dead.message)
        if mailbox.ready is None or mailbox.is_recovering:
            return self._known_health("starting")
        silence = f"the engine process has not answered for {timeout} s: {self._connection.describe_process()}"
        return self._known_health("stalled", error or silence)

    def _known_health(self, state: HealthState, error: str | None = None) -> EngineHealth:
        """The health from the engine's last messages, without a call."""
        recovery, stats = self._mailbox.recovery, self._mailbox.stats
        return EngineHealth(
            state,
            step=stats.step,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_restarts=self.num_worker_restarts,
            restart_cause=None if recovery is None else recovery.cause.message,
            error=error,
        )

    def _call(self, target: str, call: WorkerCall) -> list[Any]:
        encoded = call.encoded()
        message = RpcCall(next(self._call_ids), target, encoded.method, encoded.is_callable, **encoded.options())
        return self._answer(message, encoded.parts, encoded.method)

    def _answer(self, message: RpcCall | Operate, parts: Sequence[Buffer], method: str) -> list[Any]:
        """Sends a call and waits for its values; method: its name."""
        timeout_s = message.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s + _REPLY_GRACE_S
        answer = self._exchange(message, parts, deadline)
        if answer is None:
            raise RpcTimeoutError(
                f"{method}: no answer of the engine within {timeout_s} s",
                method=method,
                timeout_s=timeout_s,
                missing_ranks=[],
            )
        return values_of(*answer, method)

    def _exchange(
        self,
        message: RpcCall | Operate,
        parts: Sequence[Buffer],
        deadline: float | None,
        until: Callable[[], bool] = lambda: False,
    ) -> Received[RpcResult] | None:
        """The answer to a call; None at the deadline, or once `until` returns True."""
        self.owner.check()
        call_id, mailbox = message.call_id, self._mailbox
        mailbox.expect(call_id)
        try:
            if self._send(message, parts, deadline):
                mailbox.wait_for(lambda: mailbox.has_answer(call_id) or until() or None, deadline)
        finally:
            answer = mailbox.forget(call_id)
        return answer

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def _send(self, message: ClientMessage, buffers: Sequence[Buffer] = (), deadline: float | None = None) -> bool:
        """Sends a message; False if the socket stayed full until the deadline. Raises the cause of the engine's
        death."""
        self.owner.check()
        self._mailbox.check_alive()
        try:
            self._connection.send(message, buffers, deadline)
        except TimeoutError:
            return False
        except StreamClosed:
            self._mailbox.wait_for(lambda: None, None)  # raises as soon as the cause is known
        return True

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    def close(self, cause: RingcoreError | None = None) -> None:
        """Ends the engine and its workers. Idempotent and bounded; pending and later calls raise the cause, or
        `EngineDeadError`."""
        if not self.owner.is_here:
            return
        self._mailbox.mark_dead(cause or EngineDeadError("the engine was closed", process="engine"))
        self._connection.wake()
        self._mailbox.wait_receiver_exit(_RECEIVER_EXIT_S)
        self._finalizer()

    def __enter__(self) -> EngineCoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def values_of(result: RpcResult, buffers: Sequence[Buffer], method: str) -> list[Any]:
    """The values of a call's answer, one per replying rank. Raises the call's error."""
    if result.error is not None:
        raise error_of(result.error)
    parts = iter(buffers)
    try:
        return [decode_value(list(islice(parts, num_parts))) for num_parts in result.num_parts]
    except msgspec.DecodeError as error:
        raise RingcoreError(f"{method}: the returned value cannot be decoded: {error}") from error


def _batches(requests: Sequence[EngineCoreRequest]) -> Iterator[list[EngineCoreRequest]]:
    """Splits requests into messages that the engine decodes in about a millisecond each, between two steps."""
    batch: list[EngineCoreRequest] = []
    num_tokens = 0
    for request in requests:
        batch.append(request)
        num_tokens += request.num_prompt_tokens + len(request.sampling_params.allowed_token_ids or ())
        if num_tokens >= _TOKENS_PER_MESSAGE or len(batch) >= _REQUESTS_PER_MESSAGE:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
