"""The status board: a page of shared memory with each worker's heartbeat and current call, which the parent reads
without a call. An engine process has one too: see `engine_core.heartbeat`.

One line of 64 bytes a rank, written by that rank alone, each word whole:

    word   0            1               2                        3                  4 to 7
           heartbeat    busy since      current or last call     calls executed     the method's name, if no step
           ns           ns, 0: idle     4 * id + kind            count              UTF-8, cut to 32 bytes

An engine's page has one line of these, and then the owner of a process that was handed over: its pid, one word.

Times are on the monotonic clock, which all processes of a host share. The words are not read atomically together:
a reader may see one call with the count of the next. That suffices for a report, and for a watchdog that checks again.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple

from ringcore.executor.ring_memory import PAGE, SEALS, seal, shared_memory
from ringcore.executor.wire import STEP, STEP_METHOD

__all__ = ["LINE", "RankStatus", "StatusBoard", "StatusLine", "create_board", "note_owner", "read_line", "read_owner"]

LINE = 64
_HEARTBEAT, _BUSY, _CALL, _COUNT = range(4)
_NAME = 32  # the byte at which the name begins


class RankStatus(NamedTuple):
    """One rank's line. `call_id` is of the current call, or of the last one if the rank is idle."""

    heartbeat_ns: int
    busy_since_ns: int | None
    call_id: int
    method: str
    num_calls: int

    def has_finished(self, call_id: int) -> bool:
        """Whether the rank has executed this call. Calls are executed in the order of their ids."""
        return self.call_id > call_id or (self.call_id == call_id and self.busy_since_ns is None)


def create_board(num_ranks: int) -> int:
    """The descriptor of a board's memory, for its workers to inherit. Raises `CapacityError`."""
    fd = shared_memory("status", -(-num_ranks * LINE // PAGE) * PAGE)
    seal(fd, SEALS)
    return fd


_OWNER = struct.Struct("=Q")


def note_owner(fd: int, pid: int) -> None:
    """In an engine's page: the process that an engine process was handed over to."""
    os.pwrite(fd, _OWNER.pack(pid), LINE)


def read_owner(fd: int) -> int | None:
    """None for the process that started the engine process."""
    return int(_OWNER.unpack(os.pread(fd, _OWNER.size, LINE))[0]) or None


class StatusBoard:
    """The parent's side: reads every line. This object keeps the mapping, and not the descriptor."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
        self._lines = [self._memory[LINE * rank : LINE * (rank + 1)] for rank in range(num_ranks)]
        self._created_ns = time.monotonic_ns()

    def read(self, rank: int) -> RankStatus:
        """The rank's status. A worker without a heartbeat yet counts from the board's creation."""
        return read_line(self._lines[rank], self._created_ns)

    def copy(self) -> bytes:
        """The lines, for a reader on another host."""
        return b"".join(self._lines)


def read_line(line: memoryview, created_ns: int, later_ns: int = 0) -> RankStatus:
    """A rank's status. created_ns: in place of a heartbeat that has not come. later_ns: added to the line's times."""
    words = line.cast("Q")
    name = bytes(line[_NAME:]).rstrip(b"\0").decode(errors="replace")
    call_id, kind = divmod(words[_CALL], 4)
    return RankStatus(
        heartbeat_ns=words[_HEARTBEAT] + later_ns if words[_HEARTBEAT] else created_ns,
        busy_since_ns=words[_BUSY] + later_ns if words[_BUSY] else None,
        call_id=call_id,
        method=STEP_METHOD if kind == STEP else name,
        num_calls=words[_COUNT],
    )


class StatusLine:
    """A worker's own line. Its control thread writes the heartbeat, the thread that executes calls the rest."""

    def __init__(self, fd: int, rank: int) -> None:
        memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        self._line = memory[LINE * rank : LINE * (rank + 1)]
        self._words = self._line.cast("Q")
        self._num_calls = 0
        self.beat()

    def beat(self) -> None:
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def turn(self) -> None:
        """Sets busy since now; if it was busy already, a new turn begins."""
        self._words[_BUSY] = time.monotonic_ns()

    def go_on(self) -> None:
        """Progress of a busy process that waits for others: restarts its busy time."""
        if self._words[_BUSY]:
            self.turn()

    def begin(self, call_id: int, kind: int, method: str) -> None:
        """Begins a call. Writes no name for a step: its kind implies it."""
        words = self._words
        if kind != STEP:
            self._line[_NAME:] = method.encode(errors="replace")[: LINE - _NAME].ljust(LINE - _NAME, b"\0")
        words[_BUSY] = time.monotonic_ns()  # first: a call id without busy time would look finished
        words[_CALL] = 4 * call_id + kind

    def end(self) -> None:
        """Ends the call, after its reply was sent."""
        self._count()
        self._words[_BUSY] = 0

    def end_and_begin(self, call_id: int, kind: int, method: str) -> None:
        """Ends the call and begins one that was launched before its end: the rank is never idle in between."""
        self._count()
        self.begin(call_id, kind, method)

    def _count(self) -> None:
        self._num_calls += 1
        self._words[_COUNT] = self._num_calls
