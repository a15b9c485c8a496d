"""A shared-memory page in which each worker publishes its heartbeat and current call; its parent reads it lock-free,
without a call. The engine process has one too: see `engine_core.heartbeat`.

One cache line of 64 bytes a rank, with that rank as its only writer, each word stored atomically:

    word   0            1               2                        3                  4 to 7
           heartbeat    busy since      current or last call     calls executed     method name, except for a step
           ns           ns, 0: idle     4 * id + kind            count              UTF-8, cut to 32 bytes

Times are on the monotonic clock, which all processes of a host share. A read of the line is not atomic: a reader may
see the call of one moment with the count of the next. That suffices for diagnostics and for a watchdog that reads
periodically.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

from ringcore.executor.ring_memory import PAGE, SEALS, seal, shared_memory
from ringcore.executor.wire import STEP, STEP_METHOD

__all__ = ["RankStatus", "StatusBoard", "StatusLine", "create_board"]

LINE = 64
_HEARTBEAT, _BUSY, _CALL, _COUNT = range(4)
_NAME = 32  # the byte at which the name begins


class RankStatus(NamedTuple):
    """One rank's line. `call_id` is that of the current call, or of the last one if it is idle."""

    heartbeat_ns: int
    busy_since_ns: int | None
    call_id: int
    method: str
    num_calls: int

    def has_finished(self, call_id: int) -> bool:
        """Whether the rank has executed this call. Calls are executed in the order of their ids."""
        return self.call_id > call_id or (self.call_id == call_id and self.busy_since_ns is None)


def create_board(num_ranks: int) -> int:
    """Creates a board's memory; returns the descriptor that the workers inherit. Raises `CapacityError`."""
    fd = shared_memory("status", -(-num_ranks * LINE // PAGE) * PAGE)
    seal(fd, SEALS)
    return fd


class StatusBoard:
    """The parent's side: reads every line. This object keeps the mapping, not the descriptor."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
        self._lines = [self._memory[LINE * rank : LINE * (rank + 1)] for rank in range(num_ranks)]
        self._created_ns = time.monotonic_ns()

    def read(self, rank: int) -> RankStatus:
        """One rank's status. The heartbeat of a worker that has not written yet is the board's creation."""
        line = self._lines[rank]
        words = line.cast("Q")
        name = bytes(line[_NAME:]).rstrip(b"\0").decode(errors="replace")
        call_id, kind = divmod(words[_CALL], 4)
        return RankStatus(
            heartbeat_ns=words[_HEARTBEAT] or self._created_ns,
            busy_since_ns=words[_BUSY] or None,
            call_id=call_id,
            method=STEP_METHOD if kind == STEP else name,
            num_calls=words[_COUNT],
        )


class StatusLine:
    """A worker's own line. The control thread writes the heartbeat, the thread that executes calls writes the rest."""

    def __init__(self, fd: int, rank: int) -> None:
        memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        self._line = memory[LINE * rank : LINE * (rank + 1)]
        self._words = self._line.cast("Q")
        self._num_calls = 0
        self.beat()

    def beat(self) -> None:
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def turn(self) -> None:
        """Sets "busy since" to now: a new iteration of the loop begins."""
        self._words[_BUSY] = time.monotonic_ns()

    def go_on(self) -> None:
        """Refreshes "busy since" of a busy process that waits for another one: it is not stalled itself."""
        if self._words[_BUSY]:
            self.turn()

    def begin(self, call_id: int, kind: int, method: str) -> None:
        """A call begins. The method name is not written for a step: its kind implies it."""
        words = self._words
        if kind != STEP:
            self._line[_NAME:] = method.encode(errors="replace")[: LINE - _NAME].ljust(LINE - _NAME, b"\0")
        words[_BUSY] = time.monotonic_ns()  # stored before the call id: otherwise the call would look already executed
        words[_CALL] = 4 * call_id + kind

    def end(self) -> None:
        """The call has ended and its reply is sent."""
        self._count()
        self._words[_BUSY] = 0

    def end_and_begin(self, call_id: int, kind: int, method: str) -> None:
        """The call has ended and a later one is already in flight: the rank is never shown as idle in between."""
        self._count()
        self.begin(call_id, kind, method)

    def _count(self) -> None:
        self._num_calls += 1
        self._words[_COUNT] = self._num_calls
