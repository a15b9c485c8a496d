"""The engine process's event loop: one EngineCore, one client; it blocks in poll while there is no work."""

from __future__ import annotations

import inspect
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import msgspec

from ringcore.engine_core.core import EngineCore
from ringcore.engine_core.idle_work import IdleWork
from ringcore.engine_core.memory.calls import arguments_of, decoded_operation
from ringcore.engine_core.transport.channel import EngineChannel, StreamClosed
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, WorkerDiedError
from ringcore.executor.rpc_call import EncodedCall, RpcFuture
from ringcore.executor.status_board import StatusLine
from ringcore.executor.value_codec import encode_value
from ringcore.protocol.messages import (
    AbortRequests,
    AddRequests,
    EngineMessage,
    EngineRecovering,
    FrontEndTrace,
    Operate,
    RpcCall,
    RpcResult,
    Shutdown,
)
from ringcore.protocol.operations import OPERATIONS, MemoryOperation, wrong_arguments
from ringcore.protocol.output_reader import output_columns, split_into_messages
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, EngineStats, OutputColumns
from ringcore.protocol.wire_errors import callables_refused, invalid_call, wire_error, wire_without_details
from ringcore.tracing import now_ns
from ringcore.tracing.kinds import IDLED, RECEIVED, WAITED

if TYPE_CHECKING:
    from ringcore.engine_core.admin.endpoint import AdminEndpoint

__all__ = ["EngineLoop"]

_MESSAGES_PER_ITERATION = 16  # a flood of requests must not delay the workers' first step
_CALL_POLL_S = 0.02
_FLUSH_TIMEOUT_S = 0.5  # outputs from before a recovery should reach the client before it begins

_Answer = Callable[[RpcResult, Sequence[Buffer]], None]  # sends the reply to the call's client


class _PendingCall(NamedTuple):
    call_id: int
    answer: _Answer
    future: RpcFuture
    deadline: float | None  # monotonic seconds
    num_steps_before: int  # steps launched before the call, which the workers execute first


class EngineLoop:
    """Serves one client until it sends `Shutdown` or disconnects, and the calls that arrive at `admin`.

    The loop never blocks on a step: it polls the client's socket, the admin sockets and the executor's descriptors
    together, so it receives messages between steps and while one runs.

    Before the loop polls, the last future it checks is the oldest one, a step's or a call's. Checking any future drains
    the replies of all of them, so a future checked earlier in the iteration may complete without a descriptor left to
    wake the loop. Workers execute steps and most calls in order, so the oldest completes first and its reply wakes the
    loop. Only calls can overtake (a read-only one, or one that failed): while any is pending the poll timeout is short.

    Before it polls without a timeout it lets `IdleWork` run, and it restarts the quiet period of `IdleWork` in every
    iteration that did other work.

    Recovery: the core calls `announce_recovery` before it replaces its workers. Afterwards it has another `ready`,
    which the client gets before any output of the new workers.

    status: the line that the client's watchdog reads (see `heartbeat`); None: iterations are not timed.
    """

    def __init__(
        self,
        core: EngineCore,
        channel: EngineChannel,
        admin: AdminEndpoint | None = None,
        status: StatusLine | None = None,
    ) -> None:
        self._core, self._channel, self._admin = core, channel, admin
        self._iteration_begins, self._iteration_ends = (status.turn, status.end) if status else (_no_status, _no_status)
        self._stopping = False
        self._unsent: deque[OutputColumns] = deque()
        self._calls: deque[_PendingCall] = deque()
        self._idle_work = IdleWork(core)
        if admin is not None:
            admin.serve(core.public_methods)
        self._ready = core.ready  # the last one sent to the client
        self._poll = self._make_poll()
        self._polled = core.ready  # of the workers whose descriptors are registered in `_poll`
        self._was_operating = self._was_frozen = False
        self._tracer = core.tracing.tracer
        core.tracing.to_front_end = self._send

    def _make_poll(self) -> select.poll:
        poll = select.poll()
        for fd in (*self._own_fds(), *self._core.wait_fds()):
            poll.register(fd, select.POLLIN)
        return poll

    def _own_fds(self) -> list[int]:
        return [self._channel.fileno(), *(() if self._admin is None else self._admin.fds)]

    def run(self) -> None:
        """Runs until shutdown. Raises `EngineDeadError` if the engine dies."""
        while True:
            self._iteration_begins()
            began = self._tracer.is_on and now_ns()
            asked = self._receive_messages()
            if self._stopping:
                return
            asked |= self._receive_admin_calls()
            if asked and began and self._tracer.is_on:
                self._tracer.record((RECEIVED.number, began, now_ns()))
            answered = self._answer_settled_calls()
            outputs = self._core.advance()
            if self._core.is_frozen is not self._was_frozen:  # by an operation: no step will tell the client
                self._was_frozen = self._core.is_frozen
                self._unsent.append(output_columns([], self._core.stats()))
            self._send_outputs()  # of the previous iteration: by now the workers have their next step
            answered |= self._answer_oldest_calls()
            self._channel.flush()
            if outputs is not None and not outputs.is_empty:
                self._unsent.append(outputs)
            if asked or answered or outputs is not None:
                self._idle_work.postpone()
            if not answered and outputs is None:
                self._wait()

    def _wait(self) -> None:
        """Polls until a message, a result, a worker's death, room for the outgoing backlog, a call's deadline, or the
        time for idle work."""
        if self._admin is not None and self._admin.has_messages:
            return  # an edge-triggered descriptor will not signal them again
        if not self._calls and self._idle_work.advance():
            return  # messages are received before the next capture
        if self._core.is_operating or self._was_operating or self._polled is not self._core.ready:
            self._poll = self._make_poll()  # the descriptors have changed; `wait_fds` may replace the workers
            self._polled = self._core.ready
            self._was_operating = self._core.is_operating
        self._send_ready_after_recovery()
        wanted = select.POLLIN | (select.POLLOUT if self._channel.has_backlog else 0)
        self._poll.modify(self._channel.fileno(), wanted)
        self._iteration_ends()
        began = self._tracer.is_on and now_ns()
        ready = {fd for fd, _ in self._poll.poll(self._poll_timeout_ms())}
        if began:
            ended, num_steps = now_ns(), self._core.num_in_flight
            self._tracer.record((WAITED.number, began, ended, num_steps) if num_steps else (IDLED.number, began, ended))
            self._tracer.check(ended)  # an idle engine completes no step, which would
        if self._admin is not None:
            self._admin.notice(ready)
        ready.difference_update(self._own_fds())
        if ready and not self._core.num_in_flight and not self._calls:
            self._core.check_workers()  # a late reply, or a worker's death: no pending future would notice it

    def _poll_timeout_ms(self) -> float | None:
        if not self._calls and not self._core.is_operating:
            quiet_s = self._idle_work.wait_s()
            return None if quiet_s is None else quiet_s * 1e3
        deadlines = [call.deadline for call in self._calls if call.deadline is not None]
        left_s = min(deadlines, default=float("inf")) - time.monotonic()
        return max(0.0, min(left_s, _CALL_POLL_S)) * 1e3

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def _receive_messages(self) -> bool:
        """-> whether any message arrived."""
        for index in range(_MESSAGES_PER_ITERATION):
            try:
                received = self._channel.receive()
            except StreamClosed:
                self._stopping = True
                return True
            if received is None:
                return index > 0
            match received.message:
                case AddRequests(requests):
                    self._add(requests)
                case AbortRequests(request_ids):
                    self._queue_outputs(self._core.abort(request_ids))
                case (RpcCall() | Operate()) as call:
                    self._call(call, received.buffers, self._send)
                case FrontEndTrace() as answer:
                    self._core.tracing.take_front_end(answer)
                case Shutdown():
                    self._stopping = True
                    return True
                case _:
                    assert_never(received.message)
        return True

    def _receive_admin_calls(self) -> bool:
        """-> whether any call arrived."""
        if self._admin is None or not self._admin.is_due:
            return False
        for index in range(_MESSAGES_PER_ITERATION):
            received = self._admin.receive()
            if received is None:
                return index > 0
            self._call(received.call, received.parts, partial(self._admin.send, received.caller))
        return True

    def _add(self, requests: list[EngineCoreRequest]) -> None:
        """An invalid request becomes an output with an error; the others of the message are added."""
        for request in requests:
            try:
                self._core.add_request(request)
            except EngineDeadError:
                raise
            except RingcoreError as error:
                wire = wire_error(error)
                self._queue_outputs([EngineCoreOutput(request.request_id, [], finish_reason="error", error=wire)])

    def _call(self, call: RpcCall | Operate, buffers: Sequence[Buffer], answer: _Answer) -> None:
        try:
            match call:
                case Operate():
                    self._operate(call, call.operation, answer)
                case RpcCall(target="engine") if call.method in OPERATIONS and not call.is_callable:
                    self._operate(call, decoded_operation(call.method, buffers), answer)
                case RpcCall(target="engine"):
                    self._reply(answer, call.call_id, [encode_value(self._call_engine(call, buffers))])
                case RpcCall(target="workers"):
                    self._submit(call, buffers, answer)
                case _:
                    raise invalid_call("target", call.target, ["engine", "workers"])
        except Exception as error:
            self._reply_error(answer, call.call_id, error)

    def _operate(self, call: RpcCall | Operate, operation: MemoryOperation, answer: _Answer) -> None:
        self._track(call, answer, self._core.submit_operation(operation, call.timeout_s))

    def _submit(self, call: RpcCall, buffers: Sequence[Buffer], answer: _Answer) -> None:
        """Forwards a call to the workers without decoding its arguments."""
        if call.is_callable and not self._core.config.parallel.allow_callables:
            raise callables_refused(call.method)
        if not buffers:
            raise InvalidRequestError(
                f"{call.method}: its arguments are missing; encode them with encode_request",
                field="args",
                value=None,
            )
        encoded = EncodedCall(call.method, buffers, call.is_callable, **call.options())
        self._track(call, answer, self._core.forward_rpc(encoded))

    def _track(self, call: RpcCall | Operate, answer: _Answer, future: RpcFuture) -> None:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        self._calls.append(_PendingCall(call.call_id, answer, future, deadline, self._core.num_steps_launched))

    def _call_engine(self, call: RpcCall, buffers: Sequence[Buffer]) -> Any:
        """Calls a method of the engine itself that returns at once."""
        if call.is_callable:
            raise invalid_call("target", call.target, ["workers"])
        method = self._core.engine_call(call.method)
        args, kwargs = arguments_of(call.method, buffers)
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise wrong_arguments(call.method, str(error)) from error
        value = method(*args, **kwargs)
        return msgspec.structs.asdict(value) if isinstance(value, EngineStats) else value  # array-like on the wire

    # -----------------------------------------------------------------------------------------------------------
    # Start and recovery.

    def announce_ready(self) -> None:
        """Sends the client `EngineReady`, with the address of the admin endpoint."""
        address = None if self._admin is None else self._admin.address
        self._channel.send(msgspec.structs.replace(self._ready, admin_endpoint=address))

    def announce_recovery(self, recovering: EngineRecovering) -> None:
        """Notifies the client, after all outputs of the lost workers, and fails every pending call to them at once:
        new workers may take long to start.
        """
        self._send_outputs()
        self._answer_settled_calls()
        while self._calls:
            call = self._calls.popleft()
            lost = WorkerDiedError(recovering.cause.message, **recovering.cause.details)
            self._reply_error(call.answer, call.call_id, lost)
        self._send(recovering)
        self._channel.flush(_FLUSH_TIMEOUT_S)
        self._iteration_ends()  # the restart has deadlines of its own

    def _send_ready_after_recovery(self) -> None:
        """Sends the new `EngineReady` once the core has new workers. It makes no call to the core, which may be in the
        middle of another recovery."""
        if self._core.ready is not self._ready:
            self._ready = self._core.ready
            self.announce_ready()

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def _send(self, message: EngineMessage, buffers: Sequence[Buffer] = ()) -> None:
        self._send_ready_after_recovery()
        self._channel.send(message, buffers)

    def _send_outputs(self) -> None:
        while self._unsent:
            began_s = time.monotonic()
            for message in split_into_messages(self._unsent.popleft()):
                self._send(message)
            self._core.note_send(began_s, time.monotonic())

    def _queue_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """Queues outputs that no step produced, after the unsent ones."""
        if outputs:
            self._unsent.append(output_columns(outputs, self._core.stats()))

    def _answer_settled_calls(self) -> bool:
        """Answers every call that is done, in any order."""
        settled = [call for call in self._calls if call.future.done()]
        for call in settled:
            self._calls.remove(call)
            self._answer(call)
        return bool(settled)

    def _answer_oldest_calls(self) -> bool:
        """Answers calls in order, up to one that is not done or that has a step in flight before it."""
        answered = False
        while (
            self._calls
            and self._calls[0].num_steps_before <= self._core.num_steps_completed
            and self._calls[0].future.done()
        ):
            self._answer(self._calls.popleft())
            answered = True
        return answered

    def _answer(self, call: _PendingCall) -> None:
        try:
            values = call.future.encoded_result()
        except Exception as error:
            self._reply_error(call.answer, call.call_id, error)
        else:
            self._reply(call.answer, call.call_id, values)

    def _reply(self, answer: _Answer, call_id: int, values: list[list[Buffer]]) -> None:
        """A value that cannot be sent fails this call only."""
        try:
            answer(RpcResult(call_id, [*map(len, values)]), [part for parts in values for part in parts])
        except ValueError as error:
            self._reply_error(answer, call_id, RingcoreError(f"the call's value cannot be sent: {error}"))

    def _reply_error(self, answer: _Answer, call_id: int, error: Exception) -> None:
        """Answers one call with its error; the engine's death is raised instead and ends the loop."""
        if isinstance(error, EngineDeadError) and not isinstance(error, WorkerDiedError):
            raise error
        if not isinstance(error, RingcoreError):
            error = RingcoreError(f"{type(error).__name__}: {error}")
        try:
            answer(RpcResult(call_id, error=wire_error(error)), ())
        except (TypeError, ValueError, OverflowError, RecursionError) as failure:
            answer(RpcResult(call_id, error=wire_without_details(error, failure)), ())


def _no_status() -> None:
    """No-op in place of the status line's methods."""
