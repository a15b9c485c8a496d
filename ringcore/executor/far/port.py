"""One ZeroMQ socket that several threads use, its connections supervised.

libzmq's own thread answers heartbeats, whatever Python does: a host whose heartbeats stop is dead or cut off, and one
that is slow is not. Its connection is then closed, which the socket's monitor reports, as it does for a process that
ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ringcore.executor.far.frames import HEAD_BYTES, PIECE_BYTES
from ringcore.executor.ring_buffer import Buffer

__all__ = ["NEVER_MS", "Port"]

# A dead host is noticed after at most both together.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 400, 1200
_HANDSHAKE_MS = 5_000
_CURVE_BYTES = 1 << 10  # upper bound of what encryption adds to a frame
_COPIED_BYTES = 16 << 10  # smaller frames are copied: sharing one costs more
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # an operator of pyzmq's enums takes longer than the call
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
NEVER_MS = 1 << 30  # ZMQ's own value (-1) discards received messages when the connection ends


class Port:
    """lock: while it is held, no other thread takes or sends anything.

    take: called for each message that arrives, with its frames. on_event: for each event of the monitor, as (event,
    value); what it returns is called once the messages that came before the event were taken. By whichever thread
    pumps, one call at a time.

    Between calls either the sources are readable or every message that has arrived was taken. So a thread calls `pump`
    before it waits, and then waits for the sources and for what `take` signals.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        kind: int,
        take: Callable[[Sequence[zmq.Frame]], None],
        on_event: Callable[[int, int], Callable[[], None] | None],
        events: int,
    ) -> None:
        self._take, self._on_event = take, on_event
        self.lock = threading.RLock()  # `take` may send
        self._is_quiet = self.is_closed = False  # quiet: `pump` does nothing
        self._ends: list[Callable[[], None]] = []
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        set_option = self.socket.setsockopt
        set_option(zmq.LINGER, 0)
        set_option(zmq.SNDHWM, 0)  # the streams' windows bound the queues
        set_option(zmq.RCVHWM, 0)  # nor may a socket with heartbeats ever stop reading: see `close`
        set_option(zmq.MAXMSGSIZE, HEAD_BYTES + PIECE_BYTES + _CURVE_BYTES)
        set_option(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        set_option(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        set_option(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(events)
        self.sources: Sequence[int] = [int(self.socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def send(self, frames: Sequence[Buffer]) -> None:
        """One message. Frames above 16 KiB are sent without a copy, and must not change afterwards. Dropped if the peer
        is gone."""
        with self.lock:
            if self.is_closed:
                return
            *heads, last = frames
            try:
                for head in heads:
                    self.socket.send(head, _SNDMORE)
                self.socket.send(last, _NOBLOCK, copy=len(last) < _COPIED_BYTES)
            except zmq.ZMQError as error:
                if error.errno != zmq.EAGAIN and not self.is_closed:
                    raise
            self.pump()  # sending may have taken the signal of a message that arrived

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Several sends, with one pump at the end instead of one after each, which takes longer than the send."""
        with self.lock:
            was_quiet, self._is_quiet = self._is_quiet, True
            try:
                yield
            finally:
                self._is_quiet = was_quiet
                self.pump()

    def pump(self) -> None:
        """Takes everything that has arrived. Returns at once within `take` and `burst`."""
        with self.lock:
            if self._is_quiet or self.is_closed:
                return
            self._is_quiet = True
            try:
                self.take_events()
                while self._has_arrived(self.socket):
                    frames = [self.socket.recv(_NOBLOCK, copy=False)]
                    while frames[-1].more:
                        frames.append(self.socket.recv(_NOBLOCK, copy=False))
                    self._take(frames)
                while self._ends:
                    self._ends.pop()()
            except zmq.ZMQError:
                if not self.is_closed:  # by a signal handler, above this very use of the socket
                    raise
            finally:
                self._is_quiet = False

    def take_events(self) -> None:
        while self._has_arrived(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            end = self._on_event(event["event"], event["value"])
            if end is not None:
                self._ends.append(end)

    def _has_arrived(self, socket: zmq.Socket[bytes]) -> bool:
        return not self.is_closed and bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)

    def close(self) -> bool:
        """What libzmq has not sent is lost. False if it was closed before: only who gets True terminates the context,
        since libzmq aborts the process where two do.

        It must not linger. A lingering socket takes no message; if one arrives and the peer then closes the connection,
        the next heartbeat writes to that connection, and libzmq (4.3.5) aborts the process."""
        with self.lock:
            if self.is_closed:
                return False
            self.is_closed = True
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=0)
            return True
