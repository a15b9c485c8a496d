"""The engine in a process of its own, as its client sees it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from types import TracebackType
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.engine_core.transport.channel import Received, StreamClosed
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.base import EncodedCall, check_reply_rank
from ringcore.executor.callables import callable_name
from ringcore.executor.value_codec import decode_value
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.mailbox import Mailbox
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
    PauseMode,
    RpcCall,
    RpcResult,
)
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import EngineCoreOutputs, EngineCoreRequest, EngineStats
from ringcore.protocol.wire_errors import callables_refused

__all__ = ["EngineCoreClient", "values_of"]

_START_TIMEOUT_S = 1800.0
_RECEIVER_LEAVES_S = 10.0
_REPLY_GRACE_S = 2.0  # the engine keeps a call's deadline; this is for an engine that does not even do that
_TOKENS_A_MESSAGE = 1 << 16
_REQUESTS_A_MESSAGE = 256


class EngineCoreClient(MemoryMethods):
    """Starts an engine process and talks to it. Every wait ends on a message, the engine's death, or a deadline.

    The constructor returns while the engine is starting; `wait_ready` (or `ready`) waits for it. Thread-safe:
    whichever caller waits first receives for all of them.

    Once the engine has died, every call that waits and every later one raises the same error: what stopped a
    start-up as itself (`ModelLoadError`, `CapacityError`, ...), all else as `EngineDeadError`. An engine that replaces
    workers that died (`max_worker_restarts`) goes on: only the calls that the workers were at raise `WorkerDiedError`.

    In a process that was forked from this one every call raises `RingcoreError`, but `close`, which does nothing there.
    """

    def __init__(self, config: EngineConfig, *, start_timeout_s: float = _START_TIMEOUT_S) -> None:
        check_timeout("start_timeout_s", start_timeout_s)
        self._parallel = config.parallel
        self._start_timeout_s = start_timeout_s
        self._start_deadline = time.monotonic() + start_timeout_s
        with os_limit_errors("the engine cannot be started"):
            self._connection = EngineConnection(config)
        self.owner = self._connection.owner
        self._finalizer = weakref.finalize(self, self._connection.close)  # also when dropped, and at exit
        self._call_ids = count()
        self._mailbox = Mailbox(self._connection)

    # -----------------------------------------------------------------------------------------------------------
    # Requests and their outputs.

    def wait_ready(self) -> EngineReady:
        """Waits for the end of start-up and returns what the engine learned; raises what stopped it."""
        self.owner.check()
        ready = self._mailbox.wait_for(lambda: self._mailbox.ready, self._start_deadline)
        if ready is None:
            error = EngineDeadError(f"the engine was not ready within {self._start_timeout_s} s", process="engine")
            self._mailbox.die(error)
            self.close()
            raise error
        return ready

    @property
    def ready(self) -> EngineReady:
        """What the engine learned at its start, or at its last recovery."""
        self.owner.check()
        self._mailbox.take_in()
        return self.wait_ready()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends requests; one that the engine refuses comes back as an output with an error."""
        for batch in _batches(requests):
            self._send(AddRequests(batch))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; those that were alive put out a last output with finish reason "abort"."""
        self._send(AbortRequests(list(request_ids)))

    def get_outputs(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The engine's next outputs, in order. Without any, and with the last known stats, after `timeout` seconds."""
        self.owner.check()
        check_timeout("timeout", timeout)
        outputs = self._mailbox.take_outputs(_deadline(timeout))
        return outputs if outputs is not None else EngineCoreOutputs([], self._mailbox.stats)

    @property
    def is_alive(self) -> bool:
        """False once it is known that the engine has died, or was closed."""
        return self._mailbox.dead is None

    @property
    def stats(self) -> EngineStats:
        """As the engine told them last. Of one that is dead nothing runs or waits."""
        return self._mailbox.stats

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Calls an `@rpc` method on every worker; one value a rank, in rank order, or `unique_reply_rank`'s alone.

        method: a name; or, with the option `allow_callables`, a function that each worker calls as
        f(worker, *args, **kwargs). Values arrive as builtins and arrays (see `executor.value_codec`).

        Raises `WorkerError` if it raised there (its `failures` are those of all ranks), `RpcTimeoutError` after
        `timeout` seconds, `InvalidRequestError` for what cannot be sent; the engine goes on.
        """
        check_reply_rank(unique_reply_rank, self._parallel.tensor_parallel_size)
        if callable(method) and not self._parallel.allow_callables:
            raise callables_refused(callable_name(method))
        call = EncodedCall.of(method, args, kwargs, timeout, unique_reply_rank)
        values = self._call("workers", call)
        return values if unique_reply_rank is None else values[0]

    def call_engine(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Calls the engine itself: one of `ENGINE_CALLS`, such as "pause" or "stats", which do not wait for a step, or
        one of `OPERATIONS`; with the arguments that `methods` tells.
        """
        (value,) = self._call("engine", EncodedCall.of(method, args, kwargs, timeout))
        return value

    def _operate(self, name: str, kwargs: Mapping[str, Any], timeout: float | None) -> MemoryReport:
        return msgspec.convert(self.call_engine(name, (), kwargs, timeout), MemoryReport)

    def methods(self) -> list[RpcMethod]:
        """`EngineCore.methods`."""
        return msgspec.convert(self.call_engine("methods"), list[RpcMethod])

    def is_sleeping(self) -> bool:
        return bool(self.call_engine("is_sleeping"))

    def pause(self, mode: PauseMode = "new") -> None:
        """`EngineCore.pause`."""
        self.call_engine("pause", (mode,))

    def resume(self) -> None:
        """`EngineCore.resume`."""
        self.call_engine("resume")

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """`EngineCore.reset_prefix_cache`."""
        return bool(self.call_engine("reset_prefix_cache", (preempt_running,)))

    def health(self, timeout: float = 1.0) -> EngineHealth:
        """How the engine does, within about `timeout` seconds. Never raises for an engine that is dead or silent.

        "starting": not ready yet, or replacing workers that died, of `restart_cause`. "stalled": the engine process
        does not answer, and `error` says what it does instead; or it answers that a step or call lasts too long.
        "dead": of `error`.
        """
        self.owner.check()
        check_timeout("timeout", timeout)
        mailbox, error = self._mailbox, None
        mailbox.take_in()
        try:
            if mailbox.ready is not None and not mailbox.is_recovering:
                answer = self._exchange(
                    "engine", EncodedCall("health", ()), _deadline(timeout), lambda: mailbox.is_recovering
                )
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
        """What is known without the engine: what it said last."""
        recovery, stats = self._mailbox.recovery, self._mailbox.stats
        return EngineHealth(
            state,
            step=stats.step,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_restarts=0 if recovery is None else recovery.num_restarts,
            restart_cause=None if recovery is None else recovery.cause.message,
            error=error,
        )

    def _call(self, target: str, call: EncodedCall) -> list[Any]:
        """Calls and waits for the values, one a replying rank."""
        deadline = None if call.timeout is None else time.monotonic() + call.timeout + _REPLY_GRACE_S
        answer = self._exchange(target, call, deadline)
        if answer is None:
            raise RpcTimeoutError(
                f"{call.method}: no answer of the engine within {call.timeout} s",
                method=call.method,
                timeout_s=call.timeout,
                missing_ranks=[],
            )
        return values_of(*answer, call.method)

    def _exchange(
        self, target: str, call: EncodedCall, deadline: float | None, until: Callable[[], bool] = lambda: False
    ) -> Received[RpcResult] | None:
        """The answer to a call; None at the deadline, or once `until` holds."""
        self.owner.check()
        call_id, mailbox = next(self._call_ids), self._mailbox
        message = RpcCall(call_id, target, call.method, call.is_callable, call.timeout, call.unique_reply_rank)
        mailbox.expect(call_id)
        try:
            if self._send(message, call.parts, deadline):
                mailbox.wait_for(lambda: mailbox.has_answer(call_id) or until() or None, deadline)
        finally:
            answer = mailbox.forget(call_id)
        return answer

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def _send(self, message: ClientMessage, buffers: Sequence[Buffer] = (), deadline: float | None = None) -> bool:
        """Sends a message; False if the engine did not take it before the deadline. Raises what the engine died of."""
        self.owner.check()
        self._mailbox.check_alive()
        try:
            self._connection.send(message, buffers, deadline)
        except TimeoutError:
            return False
        except StreamClosed:
            self._mailbox.wait_for(lambda: None, None)  # raises, as soon as it is known what happened
        return True

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def close(self, cause: RingcoreError | None = None) -> None:
        """Ends the engine and its workers. Idempotent and bounded; pending and later calls raise the cause, or
        `EngineDeadError`."""
        if not self.owner.is_here:
            return
        self._mailbox.die(cause or EngineDeadError("the engine was closed", process="engine"))
        self._connection.wake()
        self._mailbox.wait_until_left(_RECEIVER_LEAVES_S)
        self._finalizer()

    def __enter__(self) -> EngineCoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def values_of(result: RpcResult, buffers: Sequence[Buffer], method: str) -> list[Any]:
    """The values of a call's answer, one a replying rank. Raises the call's error."""
    if result.error is not None:
        raise error_of(result.error)
    parts = iter(buffers)
    try:
        return [decode_value(list(islice(parts, num_parts))) for num_parts in result.num_parts]
    except msgspec.DecodeError as error:
        raise RingcoreError(f"{method}: the value that came back cannot be read: {error}") from error


def _batches(requests: Sequence[EngineCoreRequest]) -> Iterator[list[EngineCoreRequest]]:
    """Messages short enough that the engine decodes each in a millisecond or so, between two steps."""
    batch: list[EngineCoreRequest] = []
    num_tokens = 0
    for request in requests:
        batch.append(request)
        num_tokens += len(request.prompt_token_ids) + len(request.sampling_params.allowed_token_ids or ())
        if num_tokens >= _TOKENS_A_MESSAGE or len(batch) >= _REQUESTS_A_MESSAGE:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
