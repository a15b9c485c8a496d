"""Out-of-band transfer of messages too large for the ring. By default each travels in its own memfd, whose descriptor
is passed over a socketpair (SCM_RIGHTS); `zmq_channel` is the other way.

The memfd has no name, is written once for all readers, is sealed against changes, and is freed with its last reader. A
ZeroMQ socket has a name that all can see, an I/O thread in every process and a copy by the kernel for each reader.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from ringcore.errors import CapacityError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.ring_memory import RingCorruptError, is_sealed, seal, shared_memory
from ringcore.host.os_limits import os_limit_errors

__all__ = [
    "STUB",
    "STUB_BYTES",
    "LargeReceiver",
    "LargeSender",
    "MemfdChannel",
    "SideChannel",
    "SideReceiver",
    "SideSender",
    "side_socketpair",
]

STUB = struct.Struct("<QQ")  # transfer number, bytes
STUB_BYTES = STUB.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NUM_TRIES = 5


class LargeSender(Protocol):
    """The sending end, to every reader of a queue."""

    def has_room(self) -> bool:
        """Whether every reader has received the earlier messages, but for one or two."""
        ...

    def try_send(self, buffers: Sequence[Buffer], size: int) -> bytes | None:
        """Sends `size` bytes, the buffers one after the other; the stub to put in the ring, or None without room.
        Raises `CapacityError`."""
        ...

    def close(self) -> None: ...


class LargeReceiver(Protocol):
    """One reader's receiving end."""

    def receive(self, stub: bytes) -> Buffer | mmap.mmap:
        """The read-only memory of the message with this stub. Raises `RingCorruptError`; `PeerDied` if its sender ends
        before it has arrived."""
        ...

    def close(self) -> None: ...


class SideChannel(ABC):
    """What both ends of a queue's large messages are made of: descriptors, which its processes inherit by name."""

    @classmethod
    @abstractmethod
    def create(cls, num_readers: int) -> Self: ...

    @classmethod
    @abstractmethod
    def from_fds(cls, fds: Mapping[str, int]) -> Self | None:
        """From an end's inherited descriptors; None if they are of another kind."""

    @abstractmethod
    def fds_of_reader(self, index: int) -> dict[str, int]: ...

    @abstractmethod
    def fds_of_writer(self) -> dict[str, int]: ...

    @abstractmethod
    def sender(self, readers: Sequence[int]) -> LargeSender:
        """Independent of this object, as every end."""

    @abstractmethod
    def receiver(self, index: int, deaths: Sequence[int]) -> LargeReceiver:
        """deaths: descriptors that become readable when the sender's process ends."""

    @abstractmethod
    def close_receiving(self) -> None: ...

    @abstractmethod
    def close_sending(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class MemfdChannel(SideChannel):
    """A socketpair for each reader."""

    def __init__(self, send_fds: dict[int, int], receive_fds: dict[int, int]) -> None:
        self._send_fds, self._receive_fds = send_fds, receive_fds

    @classmethod
    def create(cls, num_readers: int) -> Self:
        channel = cls({}, {})
        try:
            for i in range(num_readers):
                channel._send_fds[i], channel._receive_fds[i] = side_socketpair()
        except BaseException:
            channel.close()
            raise
        return channel

    @classmethod
    def from_fds(cls, fds: Mapping[str, int]) -> Self | None:
        def numbered(prefix: str) -> dict[int, int]:
            return {int(name.removeprefix(prefix)): fd for name, fd in fds.items() if name.startswith(prefix)}

        send_fds, receive_fds = numbered("send."), numbered("receive.")
        return cls(send_fds, receive_fds) if send_fds or receive_fds else None

    def fds_of_reader(self, index: int) -> dict[str, int]:
        return {f"receive.{index}": self._receive_fds[index]}

    def fds_of_writer(self) -> dict[str, int]:
        return {f"send.{i}": fd for i, fd in self._send_fds.items()}

    def sender(self, readers: Sequence[int]) -> SideSender:
        return SideSender(self._send_fds[i] for i in readers)

    def receiver(self, index: int, deaths: Sequence[int]) -> SideReceiver:
        return SideReceiver(self._receive_fds[index])

    def close_receiving(self) -> None:
        _close_all(self._receive_fds)

    def close_sending(self) -> None:
        _close_all(self._send_fds)

    def close(self) -> None:
        self.close_receiving()
        self.close_sending()


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def side_socketpair() -> tuple[int, int]:
    """The sending and the receiving descriptor of one reader's side channel."""
    send, receive = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send.setblocking(False)
    receive.setblocking(False)
    # The smallest buffer that the kernel allows: one or two large messages are in flight at a time, so that a slow
    # reader causes back-pressure, as in the ring.
    send.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return send.detach(), receive.detach()


class SideSender:
    """A `LargeSender`. Duplicates the given descriptors."""

    def __init__(self, fds: Iterable[int]) -> None:
        self._sockets = [socket.socket(fileno=os.dup(fd)) for fd in fds]
        self._num_transfers = 0

    def try_send(self, buffers: Sequence[Buffer], size: int) -> bytes | None:
        """Sends `size` bytes, the buffers one after the other; the stub to put in the ring, or None if a reader has
        not received the previous ones.

        Descriptors are sent first and the stub last, so that a reader that sees the stub finds its descriptor. If a
        socket refuses all the same, the sent descriptors have a transfer number that no stub will ever have, and their
        readers drop them. Raises `CapacityError`.
        """
        if not self.has_room():
            return None
        self._num_transfers += 1
        stub = STUB.pack(self._num_transfers, size)
        fd = _sealed_memory(buffers, size)
        try:
            self._send_all(stub, fd)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return None  # the caller notices an ended reader by its death
        finally:
            os.close(fd)
        return stub

    def _send_all(self, stub: bytes, fd: int) -> None:
        for s in self._sockets:
            try:
                socket.send_fds(s, [stub], [fd], socket.MSG_NOSIGNAL)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                raise
            except OSError as error:
                raise CapacityError(f"the descriptor of a large message cannot be sent: {error.strerror}") from error

    def has_room(self) -> bool:
        poll = select.poll()
        for s in self._sockets:
            poll.register(s, select.POLLOUT)
        return len(poll.poll(0)) == len(self._sockets)

    def close(self) -> None:
        for s in self._sockets:
            s.close()


def _sealed_memory(buffers: Sequence[Buffer], size: int) -> int:
    """A sealed memfd with the concatenated buffers.

    While the kernel holds pages, to migrate or to age them, sealing fails; a new memfd has new pages.
    """
    for tries_left in reversed(range(_NUM_TRIES)):
        fd = shared_memory("message", size)
        with ExitStack() as undo, os_limit_errors(f"a message of {size} bytes cannot be sent"):
            undo.callback(os.close, fd)
            for buffer in buffers:
                _write_all(fd, buffer)
            try:
                seal(fd, _SEALS)
            except OSError as error:
                if error.errno == errno.EBUSY and tries_left:
                    continue
                raise
            undo.pop_all()
            return fd
    raise AssertionError


def _write_all(fd: int, buffer: Buffer) -> None:
    left = memoryview(buffer)
    while left:
        left = left[os.write(fd, left) :]


def _mapped(fd: int, number: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except OSError as error:  # its descriptor has been received and will not come again
        raise RingCorruptError(f"message {number}, {size} bytes, cannot be mapped: {error.strerror}") from error


class SideReceiver:
    """A `LargeReceiver`. Duplicates the given descriptor."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

    def receive(self, stub: bytes) -> mmap.mmap:
        """The read-only memory of the message with this stub. Raises `RingCorruptError`."""
        if len(stub) != STUB.size:
            raise RingCorruptError(f"a stub of {len(stub)} bytes is none")
        number, size = STUB.unpack(stub)
        while True:
            found, fd = self._next(number)
            try:
                if found < number:
                    continue  # of an abandoned transfer
                if found > number:
                    raise RingCorruptError(f"message {found} came where {number} was announced")
                if not is_sealed(fd, _SEALS) or os.fstat(fd).st_size != size:
                    raise RingCorruptError(f"the memory of message {number} is not {size} sealed bytes")
                return _mapped(fd, number, size)
            finally:
                os.close(fd)

    def _next(self, number: int) -> tuple[int, int]:
        """The next descriptor and its transfer number."""
        try:
            tag, fds, _, _ = socket.recv_fds(self._socket, STUB.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise RingCorruptError(f"the descriptor of message {number} did not come: {error}") from error
        if not fds or len(tag) != STUB.size:
            raise RingCorruptError(f"the descriptor of message {number} was lost; raise the limit on open files")
        return STUB.unpack(tag)[0], fds[0]

    def close(self) -> None:
        self._socket.close()
