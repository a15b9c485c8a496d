"""Dispatches the engine's messages to the client's threads that wait for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, assert_never

import msgspec

from ringcore.engine_core.transport.channel import Received, StreamClosed
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.request_state import error_of
from ringcore.protocol.messages import (
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineRecovering,
    FrontEndTrace,
    RpcResult,
    StartTrace,
    TakeTrace,
)
from ringcore.protocol.output_reader import OutputReader
from ringcore.protocol.requests import NO_STATS, EngineCoreOutputs, OutputColumns
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import READ

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox:
    """Receives the engine's messages and its death. Thread-safe: the first thread that waits receives for all.

    ready: the last `EngineReady`. recovery: the last `EngineRecovering`; `is_recovering` until the next `EngineReady`.
    stats: the last known. dead: the cause of the engine's death, permanent. tracer: begins and ends as the engine says.

    Invariant: only the thread that set `is_receiving` reads from the connection, and it changes the other fields only
    under `_changed`.
    """

    def __init__(
        self, connection: EngineConnection, tracer: Tracer, observers: Sequence[FrontEndObserver] = ()
    ) -> None:
        self._connection, self._tracer, self._observers = connection, tracer, observers
        self._changed = threading.Condition()
        self.is_receiving = False
        self.ready: EngineReady | None = None
        self.recovery: EngineRecovering | None = None
        self.is_recovering = False
        self.stats = NO_STATS
        self.dead: RingcoreError | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._reader = OutputReader()
        self._expected: set[int] = set()  # ids of pending calls
        self._answers: dict[int, Received[RpcResult]] = {}
        self._waking: set[int] = set()  # calls after which an adopted engine is ready
        self._woken: tuple[EngineReady, float] | None = None  # its report for then, and when its adoption began

    # -----------------------------------------------------------------------------------------------------------
    # Waiting.

    def take_outputs(self, deadline: float | None) -> EngineCoreOutputs | None:
        """The next outputs, in order; None at the deadline."""
        return self.wait_for(lambda: self._outputs.popleft() if self._outputs else None, deadline)

    def expect(self, call_id: int) -> None:
        """Registers a pending call; its answer is kept when it arrives."""
        with self._changed:
            self._expected.add(call_id)

    def has_answer(self, call_id: int) -> bool:
        return call_id in self._answers

    def forget(self, call_id: int) -> Received[RpcResult] | None:
        """Unregisters a call; returns its answer if it has arrived. A later answer is dropped."""
        with self._changed:
            self._expected.discard(call_id)
            return self._answers.pop(call_id, None)

    def wait_for(self, take: Callable[[], T | None], deadline: float | None) -> T | None:
        """The first value of `take` that is not None; None at the deadline.

        Messages that arrived before the engine's death are returned before it is raised.
        """
        while True:
            with self._changed:
                if (value := take()) is not None:
                    return value
                self.check_alive()
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                if self.is_receiving:  # another thread receives for this one
                    self._changed.wait(left_s)
                    continue
            self.receive(left_s)

    def be_ready_after(self, call_ids: Collection[int], ready: EngineReady, began_s: float) -> None:
        """Of an adopted engine: it is ready once these calls are answered, and dead if one fails."""
        with self._changed:
            self._waking, self._woken = set(call_ids), (ready, began_s)
            self._connection.is_listening = True

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def receive(self, wait_s: float | None = 0.0) -> None:
        """Waits for messages and dispatches them; returns at once if another thread is receiving."""
        is_mine = False
        try:  # an interrupt must not leave `is_receiving` set
            with self._changed:
                if self.is_receiving or self.dead is not None:
                    return
                self.is_receiving = is_mine = True
            self._connection.wait(wait_s)
            self._dispatch_all()
        finally:
            if is_mine:
                with self._changed:
                    self.is_receiving = False
                    self._changed.notify_all()

    def _dispatch_all(self) -> None:
        error: RingcoreError | None = self._connection.death()  # first: then all that it sent before has arrived
        try:
            for received in self._connection.messages():
                self._dispatch(received)
        except EngineDeadError as unreadable:
            error = error or unreadable
        if error is not None:
            self.mark_dead(error)

    def _dispatch(self, received: Received[EngineMessage]) -> None:
        message, buffers = received
        if isinstance(message, TakeTrace):
            self._send_trace(message)
            return
        with self._changed:
            match message:
                case OutputColumns():
                    for observer in self._observers:
                        observer.received(message)
                    self.stats = message.stats
                    began = self._tracer.is_on and now_ns()
                    outputs = self._reader.read(message)  # empty if requests have started without a token yet
                    if began:
                        self._tracer.record((READ.number, began, now_ns(), message.stats.step))
                        self._tracer.check(began)
                    if self.dead is not None:  # closed: drop what another thread received meanwhile
                        self._reset_stats(num_waiting=0)
                    elif outputs:
                        self._outputs.append(EngineCoreOutputs(outputs, message.stats))
                case RpcResult() if message.call_id in self._waking:
                    self._note_waking(message)
                case RpcResult():
                    if message.call_id in self._expected:
                        self._answers[message.call_id] = Received(message, buffers)
                case EngineReady():
                    self._note_ready(message)
                case EngineRecovering():
                    self.recovery, self.is_recovering = message, True
                    self._reset_stats(self.stats.num_waiting + self.stats.num_running)
                    self._connection.is_listening = False
                case StartTrace():
                    self._tracer.start(message.deadline_ns)
                case EngineDead():
                    self._set_dead(error_of(message.error))
                case _:
                    assert_never(message)

    def _note_ready(self, ready: EngineReady) -> None:
        if self._waking and self._woken is not None:  # it lost its workers while it was parked
            self._woken = ready, self._woken[1]
        else:
            self.ready = ready
        self.is_recovering = False
        self._reset_stats(self.stats.num_waiting)
        self._connection.is_listening = True

    def _note_waking(self, answer: RpcResult) -> None:
        self._waking.remove(answer.call_id)
        if answer.error is not None:
            self._waking.clear()
            self._set_dead(error_of(answer.error))
        elif not self._waking and self._woken is not None:
            ready, began_s = self._woken
            phases = {"adopt_parked": time.monotonic() - began_s}
            self.ready = msgspec.structs.replace(ready, phase_seconds=phases)
            self._reset_stats(num_waiting=0)

    def _send_trace(self, asked: TakeTrace) -> None:
        """Ends the trace, and sends it where the engine still waits for it."""
        trace = self._tracer.take("front end")
        if now_ns() >= asked.deadline_ns:
            return
        answer = FrontEndTrace(asked.number, msgspec.msgpack.encode(trace))
        with contextlib.suppress(TimeoutError, StreamClosed):
            self._connection.send(answer, deadline=asked.deadline_ns / 1e9)

    # -----------------------------------------------------------------------------------------------------------
    # Death.

    def mark_dead(self, error: RingcoreError) -> None:
        """Marks the engine dead; the first cause is kept."""
        with self._changed:
            self._set_dead(error)
            self._changed.notify_all()

    def _set_dead(self, error: RingcoreError) -> None:
        self.dead = self.dead or error
        self._reset_stats(num_waiting=0)

    def _reset_stats(self, num_waiting: int) -> None:
        """Without workers no request runs and the KV cache is empty."""
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=num_waiting,
            num_free_blocks=self.stats.num_free_blocks if self.ready is None else self.ready.num_blocks,
            is_sleeping=self.stats.is_sleeping and self.dead is None,
        )

    def check_alive(self) -> None:
        """Raises the cause of the engine's death: a copy, since a traceback belongs to one raise."""
        if self.dead is not None:
            raise type(self.dead)(self.dead.message, **self.dead.details)

    def wait_receiver_exit(self, timeout_s: float) -> None:
        """Waits until no thread receives any more, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_receiving, timeout_s)
