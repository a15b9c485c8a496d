"""The agent of a host that joins an engine: starts its workers as the engine does its own (`NearHost`), and moves
messages between the streams of the connection and their rings.

    engine                    agent                                                  workers
    calls, control ─ stream ─▶ _Relay ─ ring, read by all workers of the host ──────▶
    replies        ◀ stream ── _Relay ◀ ring of each worker ─────────────────────────
    notes          ◀──────────  Started, Status twice a second, WorkerEnded, Stacks

It holds a message until the next ring or stream has room for it, and its sender's window is not released before: so
back-pressure reaches from a worker to the engine. When the connection ends the workers are killed.
"""

from __future__ import annotations

import logging
import signal
import threading
import time

from ringcore.config.admin_keys import ClientKeys
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError
from ringcore.executor.far.ends import JoiningEnd
from ringcore.executor.far.frames import (
    AskStacks,
    Finish,
    Join,
    Note,
    Refuse,
    Signal,
    Stacks,
    Started,
    StartWorkers,
    Status,
    WorkerEnded,
    installed_version,
)
from ringcore.executor.far.host import CALLS, CONTROL
from ringcore.executor.far.several_hosts import held_port
from ringcore.executor.message_queue import Message, MessageReader, MessageWriter
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.waiting import SPACE_TICK_S, DeadlinePassed, PeerDied, Waiter, spin_budget_s
from ringcore.executor.worker_host import CONTROL_RING_BYTES, HostStart, NearHost
from ringcore.host.os_limits import os_limit_errors
from ringcore.protocol.codec import decoder
from ringcore.protocol.wire_errors import wire_error

__all__ = ["serve_engine"]

_BEAT_S = 0.5
_RETRY_S = 0.5
_log = logging.getLogger(__name__)


def serve_engine(endpoint: str, keys: ClientKeys, host: str, patience_s: float) -> None:
    """Joins the engine and runs its workers, again after each restart of theirs; returns when the engine has ended
    regularly. Without a connection it tries for `patience_s`.

    Raises `ConfigError` if the engine refuses the key or the host, `EngineDeadError` without an engine.
    """
    has_served = is_known = False  # the engine has dismissed this host's workers; its key is right
    connected_s = time.monotonic()
    while True:
        held = held_port("")
        join = Join(host, installed_version(), held.getsockname()[1])
        session = _Session(JoiningEnd(endpoint, keys), join)
        try:
            session.run()
            has_served, is_known, connected_s = True, True, time.monotonic()
        except _Lost as lost:
            reason = session.end.refused or (None if is_known else session.end.unknown)
            if reason is not None:
                text = f"join={endpoint!r}: refused: {reason}"
                raise ConfigError(text, option="join", value=repr(endpoint)) from None
            if has_served and not session.had_workers:
                return  # it has dismissed these workers, and listens no more
            has_served, is_known = False, is_known or session.had_workers
            connected_s = time.monotonic() if session.had_workers else connected_s
            if time.monotonic() >= connected_s + patience_s:
                raise EngineDeadError(f"no engine at {endpoint}: {lost}", process="engine") from None
            _log.info("no engine at %s: %s; trying again", endpoint, lost)
            time.sleep(_RETRY_S)
        finally:
            session.close()
            held.close()


class _Lost(Exception):
    """The connection to the engine has ended."""


class _Relay:
    """Moves messages from a reader to a writer, in order."""

    def __init__(self, reader: MessageReader, writer: MessageWriter) -> None:
        self._reader, self._writer = reader, writer
        self._held: Message | None = None

    @property
    def events(self) -> list[int]:
        return [*self._reader.events, *self._writer.events]

    @property
    def is_held(self) -> bool:
        """Whether a message waits for room."""
        return self._held is not None

    def move(self) -> bool:
        """Whether anything was moved. Raises `RingClosed` at the reader's end."""
        has_moved = False
        while True:
            if self._held is None:
                self._held = self._reader.try_receive()
            if self._held is None or not self._writer.try_send(self._held.parts):
                return has_moved
            with self._held:
                self._held = None
            has_moved = True


class _Session:
    """One connection, from joining to the engine's `Finish`. had_workers: whether it has started any."""

    def __init__(self, end: JoiningEnd, join: Join) -> None:
        self.end, self.had_workers = end, False
        self._link = end.link
        self._link.on_note = self._take_note
        self._start: HostStart | None = None
        self._host: NearHost | None = None
        self._calls: _Relay | None = None
        self._relays: list[_Relay] = []
        self._reported: set[int] = set()
        self._beat_at = 0.0
        self._is_held = self._is_finished = False
        self._link.note(join)

    def run(self) -> None:
        """Returns when the engine has dismissed the workers. Raises `_Lost`, and `ConfigError` if it refuses."""
        waiter = self._link.waiter()
        while not self._is_finished:
            try:
                waiter.wait(self._turn, self._beat_at if self._host else None, SPACE_TICK_S if self._is_held else None)
            except DeadlinePassed:
                self._beat()
            except PeerDied as death:
                if death.fd == self._link.lost_fd:
                    raise _Lost(self._link.why) from None
                self._report_ends()
                waiter = self._waiter()
            if self._host is None and self._start is not None and not self._is_finished:
                self._start_workers(self._start)
                waiter = self._waiter()

    def _turn(self) -> bool:
        """Does what there is to do; whether there was anything."""
        self._link.pump()
        has_moved = False
        for relay in list(self._relays):
            try:
                has_moved |= relay.move()
            except RingClosed:
                self._relays.remove(relay)
                if relay is self._calls and self._host is not None:
                    self._host.hang_up()
        was_held, self._is_held = self._is_held, any(relay.is_held for relay in self._relays)
        starts = self._start is not None and self._host is None
        return has_moved or starts or self._is_finished or self._is_held != was_held

    def _start_workers(self, start: HostStart) -> None:
        """Tells the engine what stopped it, if anything did."""
        self._start = None
        try:
            with os_limit_errors("the workers cannot be started"):
                host = self._host = NearHost(start)
        except RingcoreError as error:
            self._link.note(Started([], wire_error(error)))
            return
        self.had_workers = True
        parallel = start.config.parallel
        self._calls = _Relay(self._link.reader(CALLS, parallel.call_ring_bytes), host.calls)
        self._relays = [self._calls, _Relay(self._link.reader(CONTROL, CONTROL_RING_BYTES), host.control)]
        for index, replies in enumerate(host.replies):
            self._relays.append(_Relay(replies, self._link.writer(index, parallel.reply_ring_bytes)))
        self._link.note(Started([child.pid for child in host.children]))
        self._beat()

    def _waiter(self) -> Waiter:
        """For the workers that live."""
        if self._host is None:
            return self._link.waiter()
        events = {fd for relay in self._relays for fd in relay.events}
        living = [child.pidfd for i, child in enumerate(self._host.children) if i not in self._reported]
        return self._link.waiter(events, living, spin_budget_s(2 + len(self._host.children)))

    def _beat(self) -> None:
        assert self._host is not None
        states = [child.process_state() for child in self._host.children]
        self._link.note(Status(time.monotonic_ns(), self._host.board.copy(), states))
        self._beat_at = time.monotonic() + _BEAT_S

    def _report_ends(self) -> None:
        """Tells of the workers that have ended, after all that they have said."""
        self._turn()
        for index, child in enumerate(self._host.children if self._host else ()):
            if index not in self._reported and not child.is_alive():
                self._reported.add(index)
                log = child.last_log()
                self._link.note(WorkerEnded(index, child.describe_end(), child.exit_code, child.signal_name, log))

    def _take_note(self, note: Note) -> None:
        """Within a pump."""
        match note:
            case StartWorkers() if self._start is None and self._host is None:
                self._start = decoder(HostStart).decode(note.start)
            case Refuse():
                self.end.refused = note.reason
                self._link.lose(note.reason)
            case Finish():
                self._is_finished = True
                self._link.note(Finish())
            case Signal() if self._host is not None and 0 <= note.index < len(self._host.children):
                self._host.children[note.index].signal(note.number)
            case AskStacks() if self._host is not None and 0 <= note.index < len(self._host.children):
                child, link = self._host.children[note.index], self._link
                tell = lambda: link.note(Stacks(note.index, child.python_stacks()))  # noqa: E731
                threading.Thread(target=tell, name="stacks", daemon=True).start()  # it takes up to 0.5 s
            case _:
                raise RingCorruptError(f"the engine says {type(note).__name__}, which it cannot now")

    def close(self) -> None:
        """Kills the workers that are left."""
        if self._host is not None:
            if not self._is_finished:
                for child in self._host.children:
                    child.signal(signal.SIGKILL)
            self._host.close()
        self.end.close()
