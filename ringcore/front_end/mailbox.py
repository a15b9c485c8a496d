"""What the engine has sent to its client, sorted by who waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, assert_never

import msgspec

from ringcore.engine_core.transport.channel import Received
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.request_state import error_of
from ringcore.protocol.messages import EngineDead, EngineMessage, EngineReady, EngineRecovering, RpcResult
from ringcore.protocol.output_reader import OutputReader
from ringcore.protocol.requests import EngineCoreOutputs, EngineStats, OutputColumns

__all__ = ["Mailbox"]

_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)

T = TypeVar("T")


class Mailbox:
    """Takes in the engine's messages and its death. Thread-safe: whichever thread waits first receives for all.

    ready: the last `EngineReady`. recovery: the last `EngineRecovering`; `is_recovering` until the next `EngineReady`.
    stats: the last known. dead: what the engine died of, for good.

    Invariant: messages are taken from the connection only by the thread that set `is_receiving`, and sorted into the
    other fields only under `_changed`.
    """

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self.is_receiving = False
        self.ready: EngineReady | None = None
        self.recovery: EngineRecovering | None = None
        self.is_recovering = False
        self.stats = _NO_STATS
        self.dead: RingcoreError | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._reader = OutputReader()
        self._expected: set[int] = set()  # ids of calls whose answers somebody waits for
        self._answers: dict[int, Received[RpcResult]] = {}

    # -----------------------------------------------------------------------------------------------------------
    # What is waited for.

    def take_outputs(self, deadline: float | None) -> EngineCoreOutputs | None:
        """The next outputs, in order; None at the deadline."""
        return self.wait_for(lambda: self._outputs.popleft() if self._outputs else None, deadline)

    def expect(self, call_id: int) -> None:
        """Keeps the answer to this call when it comes."""
        with self._changed:
            self._expected.add(call_id)

    def has_answer(self, call_id: int) -> bool:
        return call_id in self._answers

    def forget(self, call_id: int) -> Received[RpcResult] | None:
        """The answer, if it has come; from now on it is dropped."""
        with self._changed:
            self._expected.discard(call_id)
            return self._answers.pop(call_id, None)

    def wait_for(self, take: Callable[[], T | None], deadline: float | None) -> T | None:
        """What `take` gives once it is not None; None at the deadline.

        What has arrived goes before a death, which is raised.
        """
        while True:
            with self._changed:
                if (value := take()) is not None:
                    return value
                self.check_alive()
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                if self.is_receiving:  # another thread receives for this one too
                    self._changed.wait(left_s)
                    continue
            self.take_in(left_s)

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def take_in(self, wait_s: float | None = 0.0) -> None:
        """Takes in what has arrived, after waiting for it; returns at once where another thread is at it."""
        is_mine = False
        try:  # from here on: an interrupt must not leave `is_receiving` set
            with self._changed:
                if self.is_receiving or self.dead is not None:
                    return
                self.is_receiving = is_mine = True
            self._connection.wait(wait_s)
            self._receive()
        finally:
            if is_mine:
                with self._changed:
                    self.is_receiving = False
                    self._changed.notify_all()

    def _receive(self) -> None:
        error: RingcoreError | None = self._connection.death()  # first: what it sent before its end is there by now
        try:
            for received in self._connection.messages():
                self._sort(received)
        except EngineDeadError as unreadable:
            error = error or unreadable
        if error is not None:
            self.die(error)

    def _sort(self, received: Received[EngineMessage]) -> None:
        message, buffers = received
        with self._changed:
            match message:
                case OutputColumns():
                    self.stats = message.stats
                    outputs = self._reader.read(message)  # none, where requests have begun and no more
                    if self.dead is not None:  # after a close no caller gets what another thread received
                        self._note_idle(num_waiting=0)
                    elif outputs:
                        self._outputs.append(EngineCoreOutputs(outputs, message.stats))
                case RpcResult():
                    if message.call_id in self._expected:
                        self._answers[message.call_id] = Received(message, buffers)
                case EngineReady():
                    self.ready, self.is_recovering = message, False
                    self._note_idle(self.stats.num_waiting)
                    self._connection.is_listening = True
                case EngineRecovering():
                    self.recovery, self.is_recovering = message, True
                    self._note_idle(self.stats.num_waiting + self.stats.num_running)
                    self._connection.is_listening = False
                case EngineDead():
                    self._note_dead(error_of(message.error))
                case _:
                    assert_never(message)

    # -----------------------------------------------------------------------------------------------------------
    # Death.

    def die(self, error: RingcoreError) -> None:
        """The first cause of a death stays."""
        with self._changed:
            self._note_dead(error)
            self._changed.notify_all()

    def _note_dead(self, error: RingcoreError) -> None:
        self.dead = self.dead or error
        self._note_idle(num_waiting=0)

    def _note_idle(self, num_waiting: int) -> None:
        """Without workers nothing is computed, and nothing is cached."""
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=num_waiting,
            num_free_blocks=self.stats.num_free_blocks if self.ready is None else self.ready.num_blocks,
            is_sleeping=self.stats.is_sleeping and self.dead is None,
        )

    def check_alive(self) -> None:
        """Raises what the engine died of: a fresh copy, since a traceback belongs to one raise."""
        if self.dead is not None:
            raise type(self.dead)(self.dead.message, **self.dead.details)

    def wait_until_left(self, timeout_s: float) -> None:
        """Waits until no thread receives any more, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_receiving, timeout_s)
