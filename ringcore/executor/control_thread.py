"""The control thread of a worker: executes read-only methods while the main thread executes a step or a call."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringcore.errors import InvalidRequestError
from ringcore.executor.message_queue import MessageReader
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.status_board import StatusLine
from ringcore.executor.waiting import DeadlinePassed, PeerDied
from ringcore.executor.wire import CALL, CallHead, unpack_call
from ringcore.executor.worker_calls import Outcome, failed, perform_call

__all__ = ["ControlThread"]

BEAT_S = 1.0
_log = logging.getLogger(__name__)


class ControlThread:
    """A daemon thread that reads the control queue and never spins: idle, it wakes once in `BEAT_S` for the heartbeat.

    It starts before the worker exists, so that a long start has a heartbeat too; the executor sends control calls only
    after every worker has been created.
    """

    def __init__(
        self, rank: int, calls: MessageReader, status: StatusLine, reply: Callable[[CallHead, Outcome], None]
    ) -> None:
        self._rank, self._calls, self._status, self._reply = rank, calls, status, reply
        self._worker: Any = None
        self._names: frozenset[str] = frozenset()
        threading.Thread(target=self._run, name="read-only calls", daemon=True).start()

    def serve(self, worker: Any, names: Sequence[str]) -> None:
        """Sets the worker, and the names of the methods that may be called here."""
        self._worker, self._names = worker, frozenset(names)

    def _run(self) -> None:
        try:
            while True:
                self._status.beat()
                self._turn()
        except (RingClosed, PeerDied):
            return  # the main thread gets the same exception
        except BaseException:  # without this thread control calls would stay unanswered
            _log.exception("the thread of read-only calls failed")
            os._exit(1)

    def _turn(self) -> None:
        try:
            message = self._calls.receive(time.monotonic() + BEAT_S)
        except DeadlinePassed:
            return
        with message as parts:
            head, request = unpack_call(parts)
            outcome = self._perform(head, request)
        if outcome is not None:
            self._reply(head, outcome)

    def _perform(self, head: CallHead, request: Sequence[memoryview]) -> Outcome | None:
        if head.kind != CALL or head.method not in self._names:
            error = InvalidRequestError(
                f"{head.method!r} is not declared read-only; call it in order", field="method", value=head.method
            )
            return failed(error, self._rank, head.method)
        return perform_call(self._worker, self._rank, head, request)
