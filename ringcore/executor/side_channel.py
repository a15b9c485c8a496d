"""Messages that are too large for the ring: each in a memfd of its own, whose descriptor goes over a socketpair.

A ZMQ socket would need a name in some directory, an I/O thread in every process and one copy by the kernel for each
reader. The memfd has no name, is written once however many read it, cannot be changed afterwards (it is sealed), and
is gone with its last reader.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from ringcore.errors import CapacityError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.ring_memory import RingCorruptError, is_sealed, seal, shared_memory
from ringcore.host.os_limits import os_limit_errors

__all__ = ["STUB_BYTES", "SideReceiver", "SideSender", "side_socketpair"]

_STUB = struct.Struct("<QQ")  # transfer number, bytes
STUB_BYTES = _STUB.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NUM_TRIES = 5


def side_socketpair() -> tuple[int, int]:
    """The sending and the receiving descriptor of one reader's side channel."""
    send, receive = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send.setblocking(False)
    receive.setblocking(False)
    # As little as the kernel takes: one or two large messages are under way at a time, so that a slow reader bounds
    # the memory, as it does in the ring.
    send.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return send.detach(), receive.detach()


class SideSender:
    """The sending end, to every reader of a queue. It duplicates the descriptors that it is given."""

    def __init__(self, fds: Iterable[int]) -> None:
        self._sockets = [socket.socket(fileno=os.dup(fd)) for fd in fds]
        self._num_transfers = 0

    def try_send(self, buffers: Sequence[Buffer], size: int) -> bytes | None:
        """Sends `size` bytes, the buffers one after the other; the stub to put in the ring, or None where a reader
        has not taken the ones before.

        Descriptors go first and the stub last, so that a reader that sees the stub finds its descriptor waiting. Where
        a socket refuses after all, the descriptors that went out have a number that no stub will ever have, and their
        readers drop them. Raises `CapacityError`.
        """
        if not self._have_room():
            return None
        self._num_transfers += 1
        stub = _STUB.pack(self._num_transfers, size)
        fd = _sealed_memory(buffers, size)
        try:
            self._send_all(stub, fd)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return None  # of a reader that has ended, the caller learns by its death
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

    def _have_room(self) -> bool:
        poll = select.poll()
        for s in self._sockets:
            poll.register(s, select.POLLOUT)
        return len(poll.poll(0)) == len(self._sockets)

    def close(self) -> None:
        for s in self._sockets:
            s.close()


def _sealed_memory(buffers: Sequence[Buffer], size: int) -> int:
    """A file in memory with the buffers, one after the other, that nobody can change any more.

    Pages that the kernel holds, to move or to age them, cannot be sealed as long as it does; new ones can.
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
    except OSError as error:  # its descriptor is taken in and will not come again
        raise RingCorruptError(f"message {number}, {size} bytes, cannot be mapped: {error.strerror}") from error


class SideReceiver:
    """One reader's receiving end. It duplicates the descriptor that it is given."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

    def receive(self, stub: bytes) -> mmap.mmap:
        """The read-only memory of the message with this stub. Raises `RingCorruptError`."""
        if len(stub) != _STUB.size:
            raise RingCorruptError(f"a stub of {len(stub)} bytes is none")
        number, size = _STUB.unpack(stub)
        while True:
            found, fd = self._next(number)
            try:
                if found < number:
                    continue  # of a transfer that was given up
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
            tag, fds, _, _ = socket.recv_fds(self._socket, _STUB.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise RingCorruptError(f"the descriptor of message {number} did not come: {error}") from error
        if not fds or len(tag) != _STUB.size:
            raise RingCorruptError(f"the descriptor of message {number} was lost; raise the limit on open files")
        return _STUB.unpack(tag)[0], fds[0]

    def close(self) -> None:
        self._socket.close()
