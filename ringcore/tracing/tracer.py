"""The tracer of one process: spans of its work, with their times and arguments, in a bounded ring.

All times are nanoseconds of CLOCK_MONOTONIC, which is one clock for all processes of a host. A `ProcessTrace` has a
reading of the wall clock beside it, by which the traces of several hosts can be aligned as well as their wall clocks
agree.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import enumerate as all_threads
from threading import get_ident, main_thread
from time import monotonic_ns as now_ns
from typing import Any, NamedTuple, TypeVar

import msgspec

from ringcore.errors import InvalidRequestError
from ringcore.tracing.chain import Chain, Kind
from ringcore.tracing.kinds import CHAINS

__all__ = ["MAX_TRACE_S", "Chain", "Kind", "ProcessTrace", "Span", "Tracer", "check_seconds", "now_ns"]

CAPACITY, NOTES = 1 << 17, 1 << 15  # of each ring

MAX_TRACE_S = 600.0

_PAST = -1

T = TypeVar("T")


class Span(NamedTuple):
    """A span or moment. track: the name of a thread, or its ident."""

    kind: Kind
    track: int | str
    began_ns: int
    ended_ns: int
    args: Sequence[Any] = ()


class ProcessTrace(msgspec.Struct, frozen=True):
    """What one process has recorded. The spans are made of it where it is read (`spans`): that would take the process
    longer than a step."""

    process: str  # "front end", "engine", "worker 0", ...
    pid: int
    host: str
    began_ns: int  # when it began to record
    deadline_ns: int  # what ended later is no part of it
    taken_ns: int  # when the records were taken
    taken_unix_ns: int  # the same moment by the host's wall clock
    is_full: bool  # newer records may have replaced the oldest
    chains: list[tuple[str, tuple[Kind | None, ...]]]  # of its own version: track, kinds
    records: list[tuple[Any, ...]]  # the number of a chain, then its fields
    notes: list[Span]
    threads: dict[int, str]  # the names, by ident

    def spans(self) -> Iterator[Span]:
        """In no order; their tracks are names. Those of one track are nested or disjoint."""
        chains = [Chain(number, track, *kinds) for number, (track, kinds) in enumerate(self.chains)]
        for number, *fields in self.records:
            chain = chains[number]
            for kind, began_ns, ended_ns, args in chain.spans(fields):
                if ended_ns <= self.deadline_ns:
                    yield Span(kind, chain.track, began_ns, ended_ns, args)
        for note in self.notes:
            if note.ended_ns <= self.deadline_ns:
                yield note._replace(track=self._name(note.track))

    def _name(self, track: int | str) -> str:
        return track if isinstance(track, str) else self.threads.get(track, f"thread {track}")


class Tracer:
    """Records spans from `start` until `take`, or until the deadline, after which nothing is recorded.

    While it is off, a chain of spans costs its code one attribute check:

        began = tracer.is_on and now_ns()
        ...
        if began:
            tracer.record((SENT.number, began, now_ns()))

    record: of the spans of a chain its number, the begin of the first span, the end of each, the arguments; times are
    nanoseconds, or seconds as a float where the code has them so. While it is
    on, this takes a tenth of a microsecond: it is the append of a bounded deque, called without a Python function
    between, and the garbage collector soon forgets a tuple of numbers. What has other arguments is rare and goes into a
    ring of its own by `note`. Any thread may record. The spans of a thread must be nested or disjoint, as those of
    synchronous code are.

    Each process calls `check` in every step. on_end: called once by it when a trace ends by its deadline.
    """

    __slots__ = ("_began_ns", "_deadline_ns", "_notes", "_records", "is_on", "on_end", "record")

    record: Callable[[tuple[Any, ...]], None]

    def __init__(self) -> None:
        self.is_on = False
        self.on_end: Callable[[], None] = _no_op
        self._began_ns, self._deadline_ns = 0, _PAST
        self._reset(1, 1)

    def _reset(self, num_records: int, num_notes: int) -> None:
        """Replaces the rings: a thread that records meanwhile writes into the old ones."""
        self._records: deque[tuple[Any, ...]] = deque(maxlen=num_records)
        self._notes: deque[Span] = deque(maxlen=num_notes)
        self.record = self._records.append

    def start(self, deadline_ns: int) -> None:
        """Begins a trace, and drops an earlier one that was not taken."""
        self._reset(CAPACITY, NOTES)
        self._began_ns, self._deadline_ns = now_ns(), deadline_ns
        self.is_on = True

    @property
    def seconds_left(self) -> float:
        """Until the deadline; 0 if nothing is recorded."""
        return max(0.0, (self._deadline_ns - now_ns()) / 1e9) if self.is_on else 0.0

    def note(self, kind: Kind, began_ns: int, ended_ns: int, *args: Any, track: str | None = None) -> None:
        """Records one span with any arguments, or a moment. track: that of something else than this thread."""
        self._notes.append(Span(kind, track or get_ident(), began_ns, ended_ns, args))

    def check(self, now: int) -> None:
        """Ends the trace if it is past its deadline. now: nanoseconds."""
        if now > self._deadline_ns and self.is_on:
            self.is_on = False
            self.on_end()

    def take(self, process: str, more: Iterable[tuple[str, str, int, int]] = ()) -> ProcessTrace:
        """Ends the trace, and returns what was recorded, once. process: the name of this process. more: spans of other
        recorders: name, track, begin and end."""
        self.is_on = False
        records, notes = self._records, self._notes
        is_full = len(records) == records.maxlen or len(notes) == notes.maxlen
        deadline_ns, self._deadline_ns = self._deadline_ns, _PAST
        self._reset(1, 1)
        threads = {thread.ident: thread.name for thread in all_threads() if thread.ident is not None}
        return ProcessTrace(
            process=process,
            pid=os.getpid(),
            host=socket.gethostname(),
            began_ns=self._began_ns,
            deadline_ns=deadline_ns,
            taken_ns=now_ns(),
            taken_unix_ns=time.clock_gettime_ns(time.CLOCK_REALTIME),
            is_full=is_full,
            chains=[(chain.track, chain.kinds) for chain in CHAINS],
            records=_emptied(records),
            notes=[
                *_emptied(notes),
                *(Span(Kind(name), track, began_ns, ended_ns) for name, track, began_ns, ended_ns in more),
            ],
            threads=threads | {main_thread().ident or 0: "main"},
        )


def check_seconds(seconds: float) -> None:
    """Raises `InvalidRequestError` for a trace that is too long."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= MAX_TRACE_S:
        raise InvalidRequestError(
            f"seconds={seconds!r}: give more than 0 and at most {MAX_TRACE_S:.0f}", field="seconds", value=repr(seconds)
        )


def _emptied(ring: deque[T]) -> list[T]:
    """What was in it; a thread that still appends does not matter, which it would to an iteration."""
    return [ring.popleft() for _ in range(len(ring))]


def _no_op() -> None:
    """In place of `on_end`."""
