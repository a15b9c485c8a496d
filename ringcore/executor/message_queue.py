"""A message queue: messages of several byte buffers, up to `MAX_MESSAGE_BYTES`, in order, from one writer to a fixed
set of readers.

    reader        messages travel by                                     implementation
    ------------  -----------------------------------------------------  -------------------------------
    on this host  a ring in shared memory; large ones beside it          `near_queue`, `large_messages`
    elsewhere     a stream of an encrypted connection, one to each host  `far.queues`

Both keep the same promises: every reader receives each message once, whole and in order; a writer without room waits
for the slowest reader (back-pressure); each wait ends on a message, the end of the peer, or a deadline.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from ringcore.errors import InvalidRequestError
from ringcore.executor.ring_buffer import LINE, MAX_PARTS, Buffer
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.waiting import SPACE_TICK_S, PeerDied, SpinBudget, Waiter

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Broadcast",
    "Message",
    "MessageReader",
    "MessageWriter",
    "Outgoing",
    "layout",
    "queue_writer",
    "split",
    "too_large",
]

MAX_MESSAGE_BYTES = 1 << 30
_PADDING = memoryview(bytes(LINE))


class Message:
    """A received message on lease: `parts` are read-only memory, valid only inside the `with` block.

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


class Outgoing(list[Buffer]):
    """The parts of a message to several readers: laid out once, and framed once for all streams with the same `head`.

    frames: by their head.
    """

    def __init__(self, parts: Sequence[Buffer]) -> None:
        super().__init__(parts)
        self.laid = layout(parts)
        self.frames: dict[bytes, list[bytes]] = {}

    @classmethod
    def of(cls, parts: Sequence[Buffer]) -> Outgoing:
        return parts if isinstance(parts, Outgoing) else cls(parts)


class MessageWriter(ABC):
    """The producer. Not thread-safe.

    waiter: waits for room. Its events and sources are also `events` (eventfds, drained by who waits on them) and
    `sources` (descriptors that `try_send` drains), for callers that wait for several things at once.
    burst: a context in which several such writers send, sharing what each send would cost.
    """

    events: Sequence[int]
    sources: Sequence[int]
    waiter: Waiter
    burst: Callable[[], AbstractContextManager[None]] = nullcontext

    def send(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        """Sends one message, waiting for room (back-pressure). Copies the parts: the caller may change them afterwards.

        `parts`: at most `MAX_PARTS` one-dimensional byte buffers.
        Raises `DeadlinePassed`, `PeerDied`, `RingClosed`; `InvalidRequestError` for a message that is too large,
        `CapacityError` if there is no memory for a large one.
        """
        if not self.try_send(parts):
            self.waiter.wait(lambda: self.try_send(parts), deadline, SPACE_TICK_S)

    @abstractmethod
    def try_send(self, parts: Sequence[Buffer]) -> bool:
        """Sends one message if there is room, without waiting."""

    @abstractmethod
    def has_room(self, parts: Sequence[Buffer]) -> bool:
        """Whether `try_send` would send it; if not, a reader's release wakes the waiter."""

    @abstractmethod
    def unread_bytes(self) -> int:
        """What the slowest reader has not released."""

    @abstractmethod
    def close(self) -> None:
        """Marks the queue as closed for the readers, which read what was sent before. Idempotent."""


class MessageReader(ABC):
    """One consumer. Not thread-safe, but for `has_message`.

    waiter: waits for a message. events, sources: as a writer's, drained by `has_message`.
    has_message: whether `try_receive` would return a message or raise `RingClosed`.
    spin_until: spins, yielding the core each time, until a message has arrived; False at the given monotonic time.
    """

    events: Sequence[int]
    sources: Sequence[int]
    waiter: Waiter
    has_message: Callable[[], bool]
    spin_until: Callable[[float], bool]

    def __init__(self, spin_s: float) -> None:
        self._budget = SpinBudget(spin_s)
        self.slept = self._budget.slept  # the caller reports sleeps in its own waits for this reader

    def receive(self, deadline: float | None = None) -> Message:
        """The next message, on lease. Raises `DeadlinePassed`, `PeerDied`, `RingClosed`, `RingCorruptError`."""
        message = self.try_receive()
        while message is None:
            if not self.spin(deadline):
                self.slept(self.waiter.wait(self.has_message, deadline))
            message = self.try_receive()
        return message

    def spin(self, deadline: float | None = None) -> bool:
        """Whether a message has arrived, or arrives within the spin budget and before the deadline."""
        return self._budget.spin(self.spin_until, deadline)

    def check_peer(self) -> None:
        """Raises `PeerDied` if the writer has ended; for callers that poll `has_message` instead of waiting."""
        dead_fd = self.waiter.take_events()
        if dead_fd is not None:
            raise PeerDied(dead_fd)

    @abstractmethod
    def try_receive(self) -> Message | None:
        """The next message, on lease, or None if none has arrived."""

    @abstractmethod
    def close(self) -> None:
        """Marks this reader as closed for the writer. Idempotent."""


class Broadcast(MessageWriter):
    """The writer to readers on several hosts: one writer a host, and each message to all of them or to none."""

    def __init__(self, writers: Sequence[MessageWriter], waiter: Waiter) -> None:
        """Of the writers only the first may refuse a message for which it has room, or fail to send it: its large
        messages need the kernel's consent. waiter: for the events of all."""
        self._first, *self._others = writers
        self.events = [fd for writer in writers for fd in writer.events]
        self.sources = [fd for writer in writers for fd in writer.sources]
        self.waiter = waiter

    def has_room(self, parts: Sequence[Buffer]) -> bool:
        outgoing = Outgoing.of(parts)
        return all(writer.has_room(outgoing) for writer in (self._first, *self._others))

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        outgoing = Outgoing.of(parts)
        if not all(writer.has_room(outgoing) for writer in self._others) or not self._first.try_send(outgoing):
            return False
        with self._others[0].burst():
            for writer in self._others:
                was_sent = writer.try_send(outgoing)
                assert was_sent, "room that was there is gone, with one producer"
        return True

    def unread_bytes(self) -> int:
        return max(writer.unread_bytes() for writer in (self._first, *self._others))

    def close(self) -> None:
        for writer in (self._first, *self._others):
            writer.close()
        self.waiter.close()


def queue_writer(writers: Sequence[MessageWriter], deaths: Sequence[int] = (), spin_s: float = 0.0) -> MessageWriter:
    """One writer to the readers of all these, a near one first."""
    if len(writers) == 1:
        return writers[0]
    events = [fd for writer in writers for fd in writer.events]
    sources = [fd for writer in writers for fd in writer.sources]
    return Broadcast(writers, Waiter(events, deaths, spin_s, sources))


def layout(parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """A message as one run of bytes: buffers to concatenate (scatter-gather), and their total bytes.

    First a table (count u32, then the bytes of each part u32), then the parts, each at a multiple of 64.
    Raises `InvalidRequestError` above `MAX_MESSAGE_BYTES`.
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
    if size > MAX_MESSAGE_BYTES:
        raise too_large(size)
    return laid, size


def too_large(size: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"a message of {size} bytes: at most {MAX_MESSAGE_BYTES} can be sent at once; send it in pieces",
        field="message",
        value=size,
    )


def split(payload: memoryview) -> list[memoryview]:
    """The parts of a message from `layout`'s bytes, with every length checked. Raises `RingCorruptError`."""
    size = len(payload)
    count = int.from_bytes(payload[:4], "little")
    offset = 4 * (1 + count)
    if size < 4 or count > MAX_PARTS or offset > size:
        raise RingCorruptError(f"a message of {size} bytes cannot have {count} parts")
    parts = []
    for length in struct.unpack_from(f"<{count}I", payload, 4):
        offset += -offset % LINE
        if offset + length > size:
            raise RingCorruptError(f"a part of {length} bytes at {offset} leaves its message of {size} bytes")
        parts.append(payload[offset : offset + length])
        offset += length
    return parts
