"""The workers of another host, as the executor sees them: what its agent says of them, and the streams between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from ringcore.errors import EngineDeadError, error_from_wire
from ringcore.executor.far.frames import (
    AskStacks,
    Finish,
    Note,
    Signal,
    Stacks,
    Started,
    StartWorkers,
    Status,
    WorkerEnded,
)
from ringcore.executor.far.link import Link
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.status_board import LINE, RankStatus, read_line
from ringcore.executor.waiting import DeadlinePassed, Event, PeerDied, RingClosed
from ringcore.executor.worker_host import CONTROL_RING_BYTES, GRACE_S, HostStart, WorkerHost
from ringcore.protocol.codec import encode_start

__all__ = ["CALLS", "CONTROL", "FarHost"]

CALLS, CONTROL = 0, 1  # the streams to the host; those from it are numbered as its ranks
_STACKS_S = 1.0  # more than the host itself takes
_TICK_S = 0.01
_FINISH_S = 0.5  # to take the note that these workers are no longer needed


class FarChild:
    """A `WorkerProcess` on another host. ended: how it ended, once it has."""

    def __init__(self, host: FarHost, index: int, rank: int) -> None:
        self._host, self._index = host, index
        self.name = f"worker {rank} on {host.name}"
        self.pid = 0  # on its host; 0 until it has started
        self.ended: WorkerEnded | None = None
        self.state = "running"
        self.stacks: str | None = None

    @property
    def signal_name(self) -> str | None:
        return None if self.ended is None else self.ended.signal

    def is_alive(self) -> bool:
        return self.ended is None and self._host.why is None

    def dead_error(self, rank: int | None = None) -> EngineDeadError:
        if self.ended is None:
            return self._host.lost_error(rank)
        message = f"the process {self.name!r} (pid {self.pid} there) ended: {self.ended.how}"
        if self.ended.last_log:
            message += f"; it said last: {self.ended.last_log[-1]}"
        return EngineDeadError(
            message,
            process=self.name,
            rank=rank,
            exit_code=self.ended.exit_code,
            signal=self.ended.signal,
            last_log=self.ended.last_log,
            host=self._host.name,
        )

    def last_log(self) -> list[str]:
        return [] if self.ended is None else self.ended.last_log

    def signal(self, number: int) -> None:
        if self.is_alive():
            self._host.link.note(Signal(self._index, int(number)))

    def process_state(self) -> str:
        if self.ended is not None:
            return "gone"
        return self.state if self._host.why is None else "unknown: its host is lost"

    def python_stacks(self, timeout_s: float = 0.5) -> str:
        """Asks its host, which a stack may take `timeout_s`."""
        self.stacks = None
        if self.is_alive():
            self._host.link.note(AskStacks(self._index))
        deadline = time.monotonic() + timeout_s + _STACKS_S
        while self.stacks is None and self.is_alive() and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            self._host.link.pump()
        return self.stacks or f"{self.process_state()}: no stack"


class FarHost(WorkerHost):
    """Sends `start` to the host at the other end of `link`, which it owns; `wait_started` returns when it has workers.

    name: the host's.
    """

    def __init__(self, start: HostStart, link: Link, spin_s: float) -> None:
        self.name, self.link = start.host, link
        self.ranks = start.ranks
        self._started: Started | None = None
        self._status: tuple[Status, int] | None = None  # and when it came, on this host's clock
        self._created_ns = time.monotonic_ns()
        self._has_finished = False
        self._started_event, self._ended_event = Event(), Event()
        self.children: Sequence[FarChild] = [FarChild(self, i, rank) for i, rank in enumerate(self.ranks)]
        parallel = start.config.parallel
        self.calls = link.writer(CALLS, parallel.call_ring_bytes)
        self.control = link.writer(CONTROL, CONTROL_RING_BYTES)
        self.replies = [link.reader(i, parallel.reply_ring_bytes, spin_s=spin_s) for i in range(len(self.ranks))]
        self.deaths = [link.lost_fd, self._ended_event.fd]
        link.on_note = self._take_note
        link.note(StartWorkers(encode_start(start)))

    @property
    def why(self) -> str | None:
        """Why the host is lost, if it is."""
        return self.link.why

    def wait_started(self, deadline: float, closing_fd: int) -> None:
        """Raises the error that stopped the host's start; `EngineDeadError` if it is lost, late, or `closing_fd` is
        readable."""

        def is_started() -> bool:
            self.link.pump()
            return self._started is not None

        try:
            with contextlib.closing(self.link.waiter([self._started_event.fd], [closing_fd])) as waiter:
                waiter.wait(is_started, deadline)
        except DeadlinePassed:
            raise EngineDeadError(f"the host {self.link.peer} has started no workers", host=self.name) from None
        except (PeerDied, RingClosed) as death:
            if isinstance(death, PeerDied) and death.fd != closing_fd:
                raise self.lost_error(None) from None
            raise EngineDeadError("the workers were shut down", process="workers") from None
        assert self._started is not None
        if self._started.error is not None:
            raised = error_from_wire(msgspec.to_builtins(self._started.error))
            raised.add_note(f"raised on the host {self.name!r}")
            raise raised
        for child, pid in zip(self.children, self._started.pids, strict=True):
            child.pid = pid

    def lost_error(self, rank: int | None) -> EngineDeadError:
        ranks = ", ".join(map(str, self.ranks))
        return EngineDeadError(
            f"the host {self.link.peer} with rank{'s' * (len(self.ranks) > 1)} {ranks} is lost: {self.why}",
            process="workers",
            rank=rank,
            exit_code=None,
            signal=None,
            last_log=[],
            host=self.name,
        )

    def _take_note(self, note: Note) -> None:
        """Within a pump, in any thread."""
        index = note.index if isinstance(note, WorkerEnded | Stacks) else 0
        if not 0 <= index < len(self.children):
            raise RingCorruptError(f"a note about worker {index} of {len(self.children)}")
        match note:
            case Started():
                self._started = note
                self._started_event.signal()
            case Status() if len(note.lines) == LINE * len(self.children) and len(note.states) == len(self.children):
                self._status = note, time.monotonic_ns()
                for child, state in zip(self.children, note.states, strict=True):
                    child.state = state
            case WorkerEnded():
                self.children[index].ended = note
                self._ended_event.signal()
            case Stacks():
                self.children[index].stacks = note.text
            case Finish():
                self._has_finished = True
            case _:
                raise RingCorruptError(f"a host says {type(note).__name__}, which it cannot")

    def statuses(self) -> list[RankStatus]:
        self.link.pump()
        if self._status is None:
            return [read_line(memoryview(bytes(LINE)), self._created_ns) for _ in self.children]
        status, came_ns = self._status
        lines = memoryview(status.lines)
        return [
            read_line(lines[LINE * i : LINE * (i + 1)], self._created_ns, came_ns - status.now_ns)
            for i in range(len(self.children))
        ]

    def close(self) -> None:
        if self._ended_event.fd < 0:
            return
        self.hang_up()
        if self._started is not None:  # its agent kills those that are left
            self._wait_until(lambda: not any(child.is_alive() for child in self.children), GRACE_S)
        self.link.note(Finish())
        self._wait_until(lambda: self._has_finished, _FINISH_S)
        self.link.close()
        self._started_event.close()
        self._ended_event.close()

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Until what the host says makes it true. If it is lost, late or closed here, the close goes on without."""

        def pumped() -> bool:
            self.link.pump()
            return holds()

        with (
            contextlib.suppress(DeadlinePassed, PeerDied, RingClosed),
            contextlib.closing(self.link.waiter()) as waiter,
        ):
            waiter.wait(pumped, time.monotonic() + timeout_s, _TICK_S)
