"""A message queue over a ring buffer: messages of several byte buffers, up to `MAX_MESSAGE_BYTES`, in order.

A message too large for the ring goes by the out-of-band `side_channel`, and a stub in the ring keeps its place.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ringcore.errors import InvalidRequestError
from ringcore.executor.ring_buffer import LINE, MAX_PARTS, Buffer, RecordTooLarge, RingReader, RingWriter
from ringcore.executor.ring_memory import RingCorruptError, RingHandle, create_ring
from ringcore.executor.side_channel import STUB_BYTES, SideReceiver, SideSender, side_socketpair
from ringcore.executor.waiting import SPACE_TICK_S, PeerDied, SpinBudget, Waiter

__all__ = ["MAX_MESSAGE_BYTES", "Message", "MessageReader", "MessageWriter", "QueueHandle", "create_queue"]

MAX_MESSAGE_BYTES = 1 << 30

# Kinds of records.
_INLINE, _LARGE = 1, 2
_PADDING = memoryview(bytes(LINE))


@dataclass(frozen=True)
class QueueHandle:
    """The descriptors of one queue, owned by the creator of the handle.

    Those of the ring, and for each reader a socketpair for large messages. A process that inherited one end builds its
    own handle with `from_fds`, with the descriptors of that end only.
    """

    ring: RingHandle
    send_fds: dict[int, int] = field(default_factory=dict)
    receive_fds: dict[int, int] = field(default_factory=dict)

    def fds_of_reader(self, index: int) -> dict[str, int]:
        """The descriptors that reader `index` inherits."""
        return self._shared() | {
            f"wake.{index}": self.ring.wake_fds[index],
            f"receive.{index}": self.receive_fds[index],
        }

    def fds_of_writer(self) -> dict[str, int]:
        """The descriptors that the writer inherits."""
        wakes = {f"wake.{i}": fd for i, fd in self.ring.wake_fds.items()}
        return self._shared() | wakes | {f"send.{i}": fd for i, fd in self.send_fds.items()}

    def _shared(self) -> dict[str, int]:
        return {"memory": self.ring.memory_fd, "acks": self.ring.acks_fd, "space": self.ring.space_fd}

    @classmethod
    def from_fds(cls, fds: Mapping[str, int]) -> QueueHandle:
        """The handle of an end from its inherited descriptors, by name."""

        def numbered(prefix: str) -> dict[int, int]:
            return {int(name.removeprefix(prefix)): fd for name, fd in fds.items() if name.startswith(prefix)}

        ring = RingHandle(fds["memory"], fds["acks"], fds["space"], numbered("wake."))
        return cls(ring, numbered("send."), numbered("receive."))

    def close_receiving(self) -> None:
        """Closes the readers' descriptors in the writer's process, after the readers inherited them."""
        _close_all(self.receive_fds)

    def close_sending(self) -> None:
        """Closes the writer's descriptors in a reader's process."""
        _close_all(self.send_fds)

    def close(self) -> None:
        self.ring.close()
        _close_all(self.send_fds)
        _close_all(self.receive_fds)


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def create_queue(capacity: int, num_readers: int) -> QueueHandle:
    """A queue whose ring has `capacity` bytes, a multiple of the page size. Raises `CapacityError`."""
    handle = QueueHandle(create_ring(capacity, num_readers))
    try:
        for i in range(num_readers):
            handle.send_fds[i], handle.receive_fds[i] = side_socketpair()
    except BaseException:
        handle.close()
        raise
    return handle


class Message:
    """A received message on lease: `parts` are read-only shared memory, valid only inside the `with` block.

    Leaving the block releases the memory to the writer, so the reader must copy or decode what it keeps. A numpy view
    would survive the block, and its contents would change.
    """

    __slots__ = ("_release", "parts")

    def __init__(self, release: Callable[[], None]) -> None:
        self.parts: list[memoryview] = []
        self._release = release

    def __enter__(self) -> list[memoryview]:
        return self.parts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for part in self.parts:
            try:
                part.release()
            except BufferError:  # an exported view still exists; the memory is released all the same
                continue
        self._release()


def _layout(parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Framing of a message for the side channel: buffers to concatenate (scatter-gather), and their total bytes.

    First a table (count u32, then the bytes of each part u32), then the parts, each at a multiple of 64.
    """
    table = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    laid: list[Buffer] = [table]
    size = len(table)
    for part in parts:
        if size % LINE:
            laid.append(_PADDING[size % LINE :])
            size += LINE - size % LINE
        laid.append(part)
        size += len(part)
    return laid, size


def _split(payload: memoryview) -> list[memoryview]:
    """Parses a framed message into its parts, with every length checked. Raises `RingCorruptError`."""
    size = len(payload)
    count = int.from_bytes(payload[:4], "little")
    offset = 4 * (1 + count)
    if size < 4 or count > MAX_PARTS or offset > size:
        raise RingCorruptError(f"a message of {size} bytes cannot have {count} parts")
    parts = []
    for length in payload[4:offset].cast("I"):
        offset += -offset % LINE
        if offset + length > size:
            raise RingCorruptError(f"a part of {length} bytes at {offset} leaves its message of {size} bytes")
        parts.append(payload[offset : offset + length])
        offset += length
    return parts


class MessageWriter:
    """The producer. Not thread-safe.

    deaths: descriptors that become readable when a reader ends; a blocked `send` watches them.
    """

    def __init__(self, handle: QueueHandle, deaths: Iterable[int] = (), spin_s: float = 0.0) -> None:
        self._ring = RingWriter(handle.ring)
        self._side = SideSender(handle.send_fds[i] for i in sorted(handle.send_fds))
        self._waiter = Waiter([handle.ring.space_fd], deaths, spin_s)

    def send(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        """Sends one message, waiting for room (back-pressure). Copies the parts: the caller may change them afterwards.

        `parts`: at most `MAX_PARTS` one-dimensional byte buffers.
        Raises `DeadlinePassed`, `PeerDied`, `RingClosed`; `InvalidRequestError` for a message that is too large,
        `CapacityError` if there is no memory for a large one.
        """
        if not self.try_send(parts):
            self._waiter.wait(lambda: self.try_send(parts), deadline, SPACE_TICK_S)

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        """Sends one message if there is room, without waiting."""
        try:
            return self._ring.try_write(_INLINE, parts)
        except RecordTooLarge:
            return self._try_send_large(parts)

    def _try_send_large(self, parts: Sequence[Buffer]) -> bool:
        laid, size = _layout(parts)
        if size > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"a message of {size} bytes: at most {MAX_MESSAGE_BYTES} can be sent at once; send it in pieces",
                field="message",
                value=size,
            )
        if not self._ring.has_room(STUB_BYTES):
            return False
        stub = self._side.try_send(laid, size)
        return stub is not None and self._ring.try_write(_LARGE, [stub])

    def lagging(self) -> list[int]:
        """The readers that have not released every message."""
        return self._ring.lagging()

    def unread_bytes(self) -> int:
        """Of the ring, that the slowest reader has not released."""
        return self._ring.unread_bytes()

    def close(self) -> None:
        """Marks the queue as closed for the readers. Idempotent; the handle stays open."""
        self._ring.close()
        self._side.close()


class MessageReader:
    """The consumer `index`. Not thread-safe.

    deaths: descriptors that become readable when the writer ends; a blocked `receive` watches them.
    """

    def __init__(self, handle: QueueHandle, index: int, deaths: Iterable[int] = (), spin_s: float = 0.0) -> None:
        self._ring = RingReader(handle.ring, index)
        self._side = SideReceiver(handle.receive_fds[index])
        self._budget = SpinBudget(spin_s)
        self.slept = self._budget.slept  # the caller reports sleeps in its own waits for this reader
        self._waiter = Waiter([handle.ring.wake_fds[index]], deaths)
        self._inline = Message(self._ring.release)  # reused: the ring leases one record at a time
        self.has_message = self._ring.has_record  # whether `try_receive` would return a message or raise `RingClosed`

    def receive(self, deadline: float | None = None) -> Message:
        """The next message, on lease. Raises `DeadlinePassed`, `PeerDied`, `RingClosed`, `RingCorruptError`."""
        message = self.try_receive()
        while message is None:
            if not self.spin(deadline):
                self.slept(self._waiter.wait(self.has_message, deadline))
            message = self.try_receive()
        return message

    def spin(self, deadline: float | None = None) -> bool:
        """Whether a message has arrived, or arrives within the spin budget and before the deadline."""
        until = time.monotonic() + self._budget.seconds
        return self._ring.spin(until if deadline is None else min(until, deadline))

    def try_receive(self) -> Message | None:
        """The next message, on lease, or None if none has arrived."""
        record = self._ring.try_read()
        if record is None:
            return None
        kind, parts = record
        if kind == _INLINE:
            self._inline.parts = parts
            return self._inline
        if kind != _LARGE or len(parts) != 1:
            raise RingCorruptError(f"a record of kind {kind} with {len(parts)} parts is no message")
        stub = bytes(parts[0])
        parts[0].release()
        self._ring.release()
        # The last view unmaps the memory: a view that outlives the lease stays valid, as the memory is sealed.
        message = Message(lambda: None)
        message.parts = _split(memoryview(self._side.receive(stub)))
        return message

    def check_peer(self) -> None:
        """Raises `PeerDied` if the writer has ended; for callers that poll `has_message` instead of waiting."""
        dead_fd = self._waiter.take_events()
        if dead_fd is not None:
            raise PeerDied(dead_fd)

    def close(self) -> None:
        """Marks this reader as closed for the writer. Idempotent; the handle stays open."""
        self._ring.close()
        self._side.close()
