"""Out-of-band transfer of large messages by ZeroMQ: a PUSH and a PULL socket for each reader.

Their `ipc://` names are in a directory of mode 0700, which all ends inherit as a descriptor, and which the sender
removes once every reader has connected: later nothing has a name. A receiver waits for a body that its stub has
overtaken.
"""

from __future__ import annotations

import os
import select
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.side_channel import STUB, LargeReceiver, LargeSender, SideChannel
from ringcore.executor.waiting import PeerDied

if TYPE_CHECKING:
    import zmq

__all__ = ["ZmqChannel"]

_FOLDER = "folder"
_LOST_MS = 30_000  # a body that is so much later than its stub is lost


class ZmqChannel(SideChannel):
    """folder_fd: of the sockets' directory. path: of the directory, in the process that made it, which removes it."""

    def __init__(self, folder_fd: int, path: str | None = None) -> None:
        self._folder_fd, self._path = folder_fd, path

    @classmethod
    def create(cls, num_readers: int) -> Self:
        path = tempfile.mkdtemp(prefix="ringcore-")
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    @classmethod
    def from_fds(cls, fds: Mapping[str, int]) -> Self | None:
        return cls(fds[_FOLDER]) if _FOLDER in fds else None

    def fds_of_reader(self, index: int) -> dict[str, int]:
        return {_FOLDER: self._folder_fd}

    def fds_of_writer(self) -> dict[str, int]:
        return {_FOLDER: self._folder_fd}

    def sender(self, readers: Sequence[int]) -> LargeSender:
        return _Sender(self._folder_fd, readers)

    def receiver(self, index: int, deaths: Sequence[int]) -> LargeReceiver:
        return _Receiver(self._folder_fd, index, deaths)

    def close_receiving(self) -> None:
        pass  # both ends need the directory

    def close_sending(self) -> None:
        pass

    def close(self) -> None:
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


def _address(folder_fd: int, index: int) -> str:
    return f"ipc:///proc/self/fd/{folder_fd}/{index}"


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """One message at each end, besides the one that is written or read: a slow reader causes back-pressure."""
    import zmq

    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms: a reader may connect before the sender listens
    return socket


class _Sender:
    def __init__(self, folder_fd: int, readers: Sequence[int]) -> None:
        import zmq

        self._context = zmq.Context()
        self._folder_fd = os.dup(folder_fd)
        self._num_transfers = 0
        self._sockets = [_socket(self._context, zmq.PUSH) for _ in readers]
        self._poller = zmq.Poller()
        for index, socket in zip(readers, self._sockets, strict=True):
            socket.bind(_address(self._folder_fd, index))
            self._poller.register(socket, zmq.POLLOUT)

    def has_room(self) -> bool:
        has_room = len(self._poller.poll(0)) == len(self._sockets)
        if has_room and self._folder_fd >= 0:  # every reader has connected
            self._remove_names()
        return has_room

    def _remove_names(self) -> None:
        for name in os.listdir(self._folder_fd):
            os.unlink(name, dir_fd=self._folder_fd)
        path = os.readlink(f"/proc/self/fd/{self._folder_fd}")
        if os.path.isdir(path):
            os.rmdir(path)
        os.close(self._folder_fd)
        self._folder_fd = -1

    def try_send(self, buffers: Sequence[Buffer], size: int) -> bytes | None:
        import zmq

        if not self.has_room():
            return None
        self._num_transfers += 1
        stub = STUB.pack(self._num_transfers, size)
        body = zmq.Frame(b"".join(buffers), copy=False)  # one copy for all readers
        try:
            for socket in self._sockets:
                socket.send_multipart([stub, body], zmq.NOBLOCK, copy=False)
        except zmq.Again:  # a reader has ended since: the caller notices its death, and the others drop this transfer
            return None
        return stub

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


class _Receiver:
    def __init__(self, folder_fd: int, index: int, deaths: Sequence[int]) -> None:
        import zmq

        self._context = zmq.Context()
        self._folder_fd = os.dup(folder_fd)  # connecting, and each new try, needs the address
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.connect(_address(self._folder_fd, index))
        self._deaths = frozenset(deaths)
        self._poller = zmq.Poller()
        for source in (self._socket, *self._deaths):
            self._poller.register(source, select.POLLIN)

    def receive(self, stub: bytes) -> Buffer:
        if len(stub) != STUB.size:
            raise RingCorruptError(f"a stub of {len(stub)} bytes is none")
        number, size = STUB.unpack(stub)
        while True:
            ready = dict(self._poller.poll(_LOST_MS))
            if self._socket not in ready:
                if dead := self._deaths & ready.keys():
                    raise PeerDied(min(dead))
                raise RingCorruptError(f"the body of message {number}, {size} bytes, did not come")
            head, body = self._socket.recv_multipart(copy=False)
            found, _ = STUB.unpack(head.bytes)
            if found < number:
                continue  # of an abandoned transfer
            if head.bytes != stub or len(body.buffer) != size:
                raise RingCorruptError(f"message {found}, {len(body.buffer)} bytes, came where {number} was announced")
            return body.buffer.toreadonly()

    def close(self) -> None:
        if self._folder_fd >= 0:
            self._context.destroy(linger=0)
            os.close(self._folder_fd)
            self._folder_fd = -1
