"""Out-of-band transfer of large messages by ZeroMQ: a PUSH and a PULL socket for each reader.

The creator of the queue makes the listening sockets, under abstract names that the kernel picks: they are in no
directory, so nothing is left of them, however a process ends. Both ends inherit them: the sender hands them to ZeroMQ,
a reader takes from its own the name that it connects to. As with the local admin socket, a name is no permission: the
sender takes readers of its own user alone, as the kernel knows them (SO_PEERCRED). A receiver waits for a body that its
stub has overtaken.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.side_channel import STUB, LargeReceiver, LargeSender, SideChannel
from ringcore.executor.waiting import PeerDied, signal_event

if TYPE_CHECKING:
    import zmq

__all__ = ["ZmqChannel"]

_LISTENER = "listener."
_LOST_MS = 30_000  # a body that is so much later than its stub is lost


class ZmqChannel(SideChannel):
    """listeners: descriptors of listening sockets, by the reader that connects."""

    def __init__(self, listeners: dict[int, int]) -> None:
        self._listeners = listeners

    @classmethod
    def create(cls, num_readers: int) -> Self:
        channel = cls({})
        try:
            for index in range(num_readers):
                channel._listeners[index] = _listener()
        except BaseException:
            channel.close()
            raise
        return channel

    @classmethod
    def from_fds(cls, fds: Mapping[str, int]) -> Self | None:
        listeners = {int(name.removeprefix(_LISTENER)): fd for name, fd in fds.items() if name.startswith(_LISTENER)}
        return cls(listeners) if listeners else None

    def fds_of_reader(self, index: int) -> dict[str, int]:
        return {f"{_LISTENER}{index}": self._listeners[index]}

    def fds_of_writer(self) -> dict[str, int]:
        return {f"{_LISTENER}{index}": fd for index, fd in self._listeners.items()}

    def sender(self, readers: Sequence[int]) -> LargeSender:
        return _Sender([self._listeners[index] for index in readers])

    def receiver(self, index: int, deaths: Sequence[int]) -> LargeReceiver:
        return _Receiver(self._listeners[index], deaths)

    def close_receiving(self) -> None:
        pass  # both ends have all

    def close_sending(self) -> None:
        pass

    def close(self) -> None:
        while self._listeners:
            os.close(self._listeners.popitem()[1])


def _listener() -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as made:
        made.bind("")  # an abstract name that no other socket has
        made.listen()
        return made.detach()


def _address(listener: int) -> str:
    with socket.socket(fileno=os.dup(listener)) as listening:
        name: bytes = listening.getsockname()
    return f"ipc://@{name[1:].decode()}"


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """One message at each end, besides the one that is written or read: a slow reader causes back-pressure."""
    import zmq

    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 1)
    made.setsockopt(zmq.RCVHWM, 1)
    made.setsockopt(zmq.HANDSHAKE_IVL, 0)  # no limit: the kernel has the connection, however late its sender is
    made.setsockopt(zmq.RECONNECT_IVL, -1)  # never: it ends with its sender
    return made


class _End:
    """The ZeroMQ context of one end.

    A socket that is closed while it is used is freed under its user: libzmq then aborts the process, mostly as it
    terminates the context. So a `close` during a use, in another thread or in a signal handler, only wakes that use;
    it raises `RingClosed`, and frees everything on its way out.
    """

    def __init__(self) -> None:
        import zmq

        self._context = zmq.Context()
        self._lock = threading.RLock()  # a signal handler may close while this thread holds it
        self._num_uses, self._is_closed = 0, False
        self._closing_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable from `close` on

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Every use of a socket. Raises `RingClosed` after `close`."""
        with self._lock:
            if self._is_closed:
                raise RingClosed
            self._num_uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_uses -= 1
                self._free_unless_used()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                signal_event(self._closing_fd)
                self._free_unless_used()

    def _free_unless_used(self) -> None:
        if self._is_closed and not self._num_uses and self._closing_fd >= 0:
            closing_fd, self._closing_fd = self._closing_fd, -1  # first: a signal handler may come here again
            self._free()
            os.close(closing_fd)

    def _free(self) -> None:
        self._context.destroy(linger=0)


class _Sender(_End):
    def __init__(self, listeners: Sequence[int]) -> None:
        import zmq

        super().__init__()
        self._num_transfers = 0
        self._sockets = [_socket(self._context, zmq.PUSH) for _ in listeners]
        self._poller = zmq.Poller()
        for listener, push in zip(listeners, self._sockets, strict=True):
            push.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            push.setsockopt(zmq.USE_FD, os.dup(listener))
            push.bind(_address(listener))
            self._poller.register(push, zmq.POLLOUT)

    def has_room(self) -> bool:
        with self._use():
            return len(self._poller.poll(0)) == len(self._sockets)

    def try_send(self, buffers: Sequence[Buffer], size: int) -> bytes | None:
        import zmq

        with self._use():
            if not self.has_room():
                return None
            self._num_transfers += 1
            stub = STUB.pack(self._num_transfers, size)
            body = zmq.Frame(b"".join(buffers), copy=False)  # one copy for all readers
            try:
                for push in self._sockets:
                    push.send_multipart([stub, body], zmq.NOBLOCK, copy=False)
            except zmq.Again:  # a reader has ended since: the caller notices its death, and the others drop this one
                return None
            return stub


class _Receiver(_End):
    def __init__(self, listener: int, deaths: Sequence[int]) -> None:
        import zmq

        super().__init__()
        self._listener = os.dup(listener)  # keeps the abstract socket name bound: no other process can take it
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.connect(_address(listener))
        self._deaths = frozenset(deaths)
        self._poller = zmq.Poller()
        for source in (self._socket, self._closing_fd, *self._deaths):
            self._poller.register(source, select.POLLIN)

    def receive(self, stub: bytes) -> Buffer:
        if len(stub) != STUB.size:
            raise RingCorruptError(f"a stub of {len(stub)} bytes is none")
        number, size = STUB.unpack(stub)
        with self._use():
            while True:
                ready = dict(self._poller.poll(_LOST_MS))
                if self._is_closed:
                    raise RingClosed
                if self._socket not in ready:
                    if dead := self._deaths & ready.keys():
                        raise PeerDied(min(dead))
                    raise RingCorruptError(f"the body of message {number}, {size} bytes, did not come")
                head, body = self._socket.recv_multipart(copy=False)
                found, _ = STUB.unpack(head.bytes)
                if found < number:
                    continue  # of an abandoned transfer
                if head.bytes != stub or len(body.buffer) != size:
                    came = f"message {found}, {len(body.buffer)} bytes, came where {number} was announced"
                    raise RingCorruptError(came)
                return body.buffer.toreadonly()

    def _free(self) -> None:
        super()._free()
        os.close(self._listener)
