"""The engine in a process of its own, as its client sees it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, TypeVar, assert_never

import zmq

from ringcore.config import EngineConfig
from ringcore.engine_core.channel import ClientChannel
from ringcore.engine_core.output_processor import error_of
from ringcore.engine_core.process import ENTRY, EngineStart
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.child_process import ChildProcess
from ringcore.protocol import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStats,
    RpcCall,
    RpcResult,
    Shutdown,
    encoder,
)

__all__ = ["EngineCoreClient"]

_START_TIMEOUT_S = 1800.0
_GRACEFUL_S = 10.0  # the engine gives its workers 5 s, then ends them by force
_REPLY_GRACE_S = 2.0  # the engine keeps a call's deadline; this is for an engine that does not even do that
_LAST_WORDS_S = 0.3
_TOKENS_A_MESSAGE = 1 << 16
_REQUESTS_A_MESSAGE = 256
_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)

T = TypeVar("T")


class EngineCoreClient:
    """Starts an engine process and talks to it. Every wait ends on a message, the engine's death, or a deadline.

    The constructor returns while the engine is starting; `wait_ready` (or `ready`) waits for it. Thread-safe:
    whichever caller waits first receives for all of them.

    Once the engine has died, every call that waits and every later one raises the same error: what stopped a
    start-up as itself (`ModelLoadError`, `CapacityError`, ...), all else as `EngineDeadError`.

    Invariant: messages are taken from the socket only by the thread that set `_receiving`, and given to the
    fields below it only under `_changed`.
    """

    def __init__(self, config: EngineConfig, *, start_timeout_s: float = _START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._start_deadline = time.monotonic() + start_timeout_s
        self._connection = _Connection(config)
        self._finalizer = weakref.finalize(self, self._connection.close)  # also when dropped, and at exit
        self._call_ids = count()
        self._changed = threading.Condition()
        self._receiving = False
        self._ready: EngineReady | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._results: dict[int, RpcResult] = {}
        self._waiting_calls: set[int] = set()
        self._dead: RingcoreError | None = None
        self._stats = _NO_STATS

    # -----------------------------------------------------------------------------------------------------------
    # Requests and their outputs.

    def wait_ready(self) -> EngineReady:
        """Waits for the end of start-up and returns what the engine learned; raises what stopped it."""
        ready = self._wait_for(lambda: self._ready, self._start_deadline)
        if ready is None:
            self._die(EngineDeadError(f"the engine was not ready within {self._start_timeout_s} s", process="engine"))
            self.close()
            raise self._error()
        return ready

    @property
    def ready(self) -> EngineReady:
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
        outputs = self._wait_for(self._take_outputs, _deadline(timeout))
        return outputs if outputs is not None else EngineCoreOutputs([], self._stats)

    def _take_outputs(self) -> EngineCoreOutputs | None:
        return self._outputs.popleft() if self._outputs else None

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Calls an `@rpc` method on every worker; one value a rank, in rank order.

        Raises `WorkerError` if it raised there, `RpcTimeoutError` after `timeout` seconds; the engine goes on.
        """
        value = self._call("workers", method, args, kwargs, timeout)
        return list(value)

    def call_engine(self, method: str, timeout: float | None = None) -> Any:
        """Calls the engine itself: "reset_prefix_cache" or "stats". It does not wait for a step."""
        return self._call("engine", method, (), None, timeout)

    def _call(
        self, target: str, method: str, args: Sequence[Any], kwargs: dict[str, Any] | None, timeout: float | None
    ) -> Any:
        call_id = next(self._call_ids)
        deadline = None if timeout is None else time.monotonic() + timeout + _REPLY_GRACE_S
        with self._changed:
            self._waiting_calls.add(call_id)
        try:
            self._send(RpcCall(call_id, target, method, list(args), dict(kwargs or {}), timeout))
            result = self._wait_for(lambda: self._results.pop(call_id, None), deadline)
        finally:
            with self._changed:
                self._waiting_calls.discard(call_id)  # a late result is dropped
                self._results.pop(call_id, None)
        if result is None:
            raise RpcTimeoutError(
                f"{method}: no answer of the engine within {timeout} s",
                method=method,
                timeout_s=timeout,
                missing_ranks=[],
            )
        if result.error is not None:
            raise error_of(result.error)
        return result.value

    # -----------------------------------------------------------------------------------------------------------
    # Sending and receiving.

    def _send(self, message: ClientMessage) -> None:
        if self._dead is not None:
            raise self._error()
        self._connection.channel.send(message)

    def _wait_for(self, take: Callable[[], T | None], deadline: float | None) -> T | None:
        """What `take` gives once it is not None; None at the deadline. What has arrived goes before a death."""
        while True:
            with self._changed:
                if (value := take()) is not None:
                    return value
                if self._dead is not None:
                    raise self._error()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                if self._receiving:  # another thread receives for this one too
                    self._changed.wait(left)
                    continue
                self._receiving = True
            try:
                self._connection.wait(left)
                self._receive()
            finally:
                with self._changed:
                    self._receiving = False
                    self._changed.notify_all()

    def _receive(self) -> None:
        """Takes in all that has arrived, and the engine's death."""
        error: RingcoreError | None = None
        try:
            for message in self._connection.messages():
                self._dispatch(message)
        except EngineDeadError as unreadable:
            error = unreadable
        if self._dead is None and (error is not None or (error := self._connection.death()) is not None):
            self._die(error)

    def _dispatch(self, message: EngineMessage) -> None:
        with self._changed:
            match message:
                case EngineCoreOutputs():
                    self._outputs.append(message)
                    self._stats = message.stats
                case RpcResult():
                    if message.call_id in self._waiting_calls:
                        self._results[message.call_id] = message
                case EngineReady():
                    self._ready = message
                    self._connection.is_started = True
                case EngineDead():
                    self._dead = self._dead or error_of(message.error)
                case _:
                    assert_never(message)

    def _die(self, error: RingcoreError) -> None:
        with self._changed:
            self._dead = self._dead or error
            self._changed.notify_all()

    def _error(self) -> RingcoreError:
        """The death to raise: a fresh copy, since a traceback belongs to one raise."""
        assert self._dead is not None
        return type(self._dead)(self._dead.message, **self._dead.details)

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def close(self) -> None:
        """Ends the engine and its workers. Idempotent and bounded; pending and later calls raise `EngineDeadError`."""
        self._die(EngineDeadError("the engine was closed", process="engine"))
        self._connection.wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._receiving, timeout=_GRACEFUL_S)
        self._finalizer()

    def __enter__(self) -> EngineCoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Connection:
    """The process and the channel to it. Knows nothing of the client, so that a dropped client can be finalized."""

    def __init__(self, config: EngineConfig) -> None:
        self.is_started = False
        self.channel = ClientChannel()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            start = EngineStart(config, self.channel.endpoint, self.channel.nonce)
            self._process = ChildProcess.start("engine", ENTRY, encoder().encode(start))
        except BaseException:
            os.close(self._wake_fd)
            self.channel.close()
            raise
        assert self._process.pidfd is not None  # until it is terminated
        self._poller = zmq.Poller()
        for source in (self.channel.receiver, self._process.pidfd, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Until a message, the death of the process, `wake`, or the timeout."""
        self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000) + 1))

    def wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def messages(self) -> Iterator[EngineMessage]:
        """Every message that has arrived; those of a process that has ended are waited for a moment."""
        while True:
            while (message := self.channel.receive()) is not None:
                yield message
            if self._process.is_alive() or not self.channel.receiver.poll(round(_LAST_WORDS_S * 1000)):
                return

    def death(self) -> EngineDeadError | None:
        if self._process.is_alive():
            return None
        return self._process.dead_error()

    def close(self) -> None:
        if self._wake_fd < 0:
            return
        wake_fd, self._wake_fd = self._wake_fd, -1
        if self.is_started and self._process.is_alive():
            self.channel.send(Shutdown())
        # One that is still starting reads no messages: it is told by SIGTERM, at once.
        self._process.terminate(_GRACEFUL_S if self.is_started else 0.0)
        self.channel.close()
        os.close(wake_fd)


def _batches(requests: Sequence[EngineCoreRequest]) -> Iterator[list[EngineCoreRequest]]:
    """Messages short enough that the engine decodes each in a millisecond or so, between two steps."""
    batch: list[EngineCoreRequest] = []
    num_tokens = 0
    for request in requests:
        batch.append(request)
        num_tokens += len(request.prompt_token_ids)
        if num_tokens >= _TOKENS_A_MESSAGE or len(batch) >= _REQUESTS_A_MESSAGE:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
