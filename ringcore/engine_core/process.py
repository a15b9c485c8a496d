"""The engine process: one EngineCore, one client, one loop that sleeps unless there is something to do."""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, assert_never

import msgspec
import zmq

from ringcore.config import EngineConfig
from ringcore.engine_core.channel import EngineChannel
from ringcore.engine_core.core import EngineCore
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, error_to_wire
from ringcore.executor.base import RpcFuture
from ringcore.protocol import (
    AbortRequests,
    AddRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    RpcCall,
    RpcResult,
    Shutdown,
    WireError,
    decoder,
)

__all__ = ["ENTRY", "EngineLoop", "EngineStart", "main"]

ENTRY = "ringcore.engine_core.process:main"
_HANDSHAKE_S = 60.0
_LAST_WORDS_S = 1.0
_MESSAGES_A_TURN = 16  # a flood of requests must not keep the workers waiting for their first step


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client hands to the process it starts."""

    config: EngineConfig
    endpoint: str
    nonce: bytes


class _Terminated(BaseException):
    """SIGTERM arrived: raised wherever the process is, so that a start-up is left as promptly as the loop."""


def main(payload: bytes, fds: dict[str, int]) -> None:
    """The process from beginning to end. Exit code 1 if the engine could not start or go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    signal.signal(signal.SIGTERM, _raise_terminated)
    start: EngineStart = decoder(EngineStart).decode(payload)
    channel = EngineChannel(start.endpoint, start.nonce)
    core: EngineCore | None = None
    try:
        channel.wait_for_client(_HANDSHAKE_S)
        core = EngineCore(start.config)
        channel.send(core.ready)
        gc.collect()
        gc.freeze()  # what start-up made stays: no later collection need look at it
        EngineLoop(core, channel).run()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _send_last_words(channel, error)  # before the workers are ended: the client need not wait for that
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if core is not None:
            core.shutdown()
        channel.close(_LAST_WORDS_S)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def _send_last_words(channel: EngineChannel, error: BaseException) -> None:
    if isinstance(error, _Terminated):
        error = EngineDeadError("the engine process was asked to end by SIGTERM", process="engine", signal="SIGTERM")
    elif not isinstance(error, RingcoreError):
        traceback.print_exception(error, file=sys.stderr)
        error = EngineDeadError(f"the engine process failed: {type(error).__name__}: {error}", process="engine")
    try:
        channel.send(EngineDead(_wire(error)))
    except (zmq.ZMQError, TypeError, ValueError, OverflowError) as failure:
        # The client is gone, or the error has details that cannot be sent: the log is what is left.
        print(f"{type(error).__name__}: {error} (and telling the client failed: {failure})", file=sys.stderr)  # noqa: T201


def _wire(error: RingcoreError) -> WireError:
    return msgspec.convert(error_to_wire(error), WireError)


class _PendingCall(NamedTuple):
    call_id: int | None  # None: the loop's own question whether the workers live
    future: RpcFuture
    deadline: float | None  # monotonic seconds
    num_steps_before: int  # steps that were launched before it, which the workers execute first


class EngineLoop:
    """Serves one client until it says `Shutdown`.

    Messages are taken in between steps and while one runs, since a step is never waited for: the loop sleeps on
    the client's socket and on the executor's descriptors together.

    Before it sleeps, the last future it asks is the oldest one, be it a step's or a call's. Asking any future takes
    in the replies of all of them; one that was asked earlier in the turn may be settled by that, with nothing left to
    wake the loop. The oldest is settled first, since workers execute in order, so its reply is the one to wake up for.
    """

    def __init__(self, core: EngineCore, channel: EngineChannel) -> None:
        self._core, self._channel = core, channel
        self._stopping = False
        self._unsent: list[EngineCoreOutput] = []
        self._calls: deque[_PendingCall] = deque()
        self._engine_methods: dict[str, Callable[[], Any]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "stats": lambda: msgspec.structs.asdict(core.stats()),
        }
        self._poller = zmq.Poller()
        self._poller.register(channel.socket, zmq.POLLIN)
        for fd in core.wait_fds():
            self._poller.register(fd, zmq.POLLIN)

    def run(self) -> None:
        while True:
            self._take_messages()
            if self._stopping:
                return
            self._answer_overdue_calls()
            outputs = self._core.advance()
            self._send_outputs()  # those of the turn before: by now the workers have their next step
            answered = self._answer_oldest_calls()
            if outputs is not None:
                self._unsent = outputs
            elif not answered:
                self._sleep()

    def _sleep(self) -> None:
        """Until a message, a result, a worker's death, or a call's deadline."""
        deadline = min((call.deadline for call in self._calls if call.deadline is not None), default=None)
        timeout_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
        ready = dict(self._poller.poll(timeout_ms))
        ready.pop(self._channel.socket, None)
        if ready and not self._core.num_in_flight and not self._calls:
            # Nobody waits for what arrived: a late reply, or a worker's end. Asking takes in the one and raises
            # the other.
            self._submit(None, RpcCall(0, "workers", "health"))

    # -----------------------------------------------------------------------------------------------------------
    # In.

    def _take_messages(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            message = self._channel.receive()
            match message:
                case None:
                    return
                case AddRequests():
                    self._add(message.requests)
                case AbortRequests():
                    self._unsent += self._core.abort(message.request_ids)
                case RpcCall():
                    self._call(message)
                case Shutdown():
                    self._stopping = True
                    return
                case _:
                    assert_never(message)

    def _add(self, requests: list[EngineCoreRequest]) -> None:
        """A wrong request is an output with an error; its neighbours go on."""
        for request in requests:
            try:
                self._core.add_request(request)
            except EngineDeadError:
                raise
            except RingcoreError as error:
                self._unsent.append(EngineCoreOutput(request.request_id, [], finish_reason="error", error=_wire(error)))

    def _call(self, call: RpcCall) -> None:
        try:
            match call.target:
                case "engine":
                    self._reply(call.call_id, self._engine_method(call)())
                case "workers":
                    self._submit(call.call_id, call)
                case target:
                    raise _invalid_call("target", target, ["engine", "workers"])
        except EngineDeadError:
            raise
        except Exception as error:
            self._reply_error(call.call_id, error)

    def _submit(self, call_id: int | None, call: RpcCall) -> None:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        future = self._core.submit_rpc(call.method, call.args, call.kwargs, call.timeout_s)
        self._calls.append(_PendingCall(call_id, future, deadline, self._core.num_steps_launched))

    def _engine_method(self, call: RpcCall) -> Callable[[], Any]:
        if call.method not in self._engine_methods:
            raise _invalid_call("method", call.method, sorted(self._engine_methods))
        if call.args or call.kwargs:
            raise InvalidRequestError(f"{call.method} takes no arguments", field="args", value=repr(call.args))
        return self._engine_methods[call.method]

    # -----------------------------------------------------------------------------------------------------------
    # Out.

    def _send_outputs(self) -> None:
        if self._unsent:
            self._channel.send(EngineCoreOutputs(outputs=self._unsent, stats=self._core.stats()))
            self._unsent = []

    def _answer_overdue_calls(self) -> None:
        now = time.monotonic()
        for call in [c for c in self._calls if c.deadline is not None and c.deadline <= now and c.future.done()]:
            self._calls.remove(call)
            self._answer(call)

    def _answer_oldest_calls(self) -> bool:
        """Answers calls in order, up to one that is not settled or that has a step in flight before it."""
        answered = False
        while (
            self._calls
            and self._calls[0].num_steps_before <= self._core.num_steps_taken
            and self._calls[0].future.done()
        ):
            self._answer(self._calls.popleft())
            answered = True
        return answered

    def _answer(self, call: _PendingCall) -> None:
        try:
            value = call.future.result()
        except EngineDeadError:
            raise
        except Exception as error:
            if call.call_id is not None:
                self._reply_error(call.call_id, error)
        else:
            if call.call_id is not None:
                self._reply(call.call_id, value)

    def _reply(self, call_id: int, value: Any) -> None:
        """A value that cannot be sent is that call's error and nothing else's."""
        try:
            self._channel.send(RpcResult(call_id, value=value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._reply_error(call_id, RingcoreError(f"the call's value cannot be sent: {error}"))

    def _reply_error(self, call_id: int, error: Exception) -> None:
        if not isinstance(error, RingcoreError):
            error = RingcoreError(f"{type(error).__name__}: {error}")
        self._channel.send(RpcResult(call_id, error=_wire(error)))


def _invalid_call(field: str, value: str, valid: list[str]) -> InvalidRequestError:
    return InvalidRequestError(f"{field}={value!r}: give one of {', '.join(valid)}", field=field, value=value)
