"""The message queue to readers on this host, over a ring buffer.

A message too large for the ring goes beside it, by a `SideChannel`, and a stub in the ring keeps its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ringcore.executor.message_queue import Message, MessageReader, MessageWriter, layout, split
from ringcore.executor.ring_buffer import Buffer, RecordTooLarge, RingReader, RingWriter
from ringcore.executor.ring_memory import RingCorruptError, RingHandle, create_ring
from ringcore.executor.side_channel import STUB_BYTES, MemfdChannel, SideChannel
from ringcore.executor.waiting import Waiter, looks_per_yield
from ringcore.executor.zmq_channel import ZmqChannel

__all__ = ["NearReader", "NearWriter", "QueueHandle", "create_queue"]

# Kinds of records.
_INLINE, _LARGE = 1, 2
CHANNELS: Mapping[str, type[SideChannel]] = {"memfd": MemfdChannel, "zmq": ZmqChannel}  # by `large_messages`


@dataclass(frozen=True)
class QueueHandle:
    """The descriptors of one queue, owned by the creator of the handle: those of the ring, and of the side channel.

    A process that inherited one end builds its own handle with `from_fds`, with the descriptors of that end only.
    """

    ring: RingHandle
    side: SideChannel

    def fds_of_reader(self, index: int) -> dict[str, int]:
        """The descriptors that reader `index` inherits."""
        return self._shared() | {f"wake.{index}": self.ring.wake_fds[index]} | self.side.fds_of_reader(index)

    def fds_of_writer(self) -> dict[str, int]:
        """The descriptors that the writer inherits."""
        wakes = {f"wake.{i}": fd for i, fd in self.ring.wake_fds.items()}
        return self._shared() | wakes | self.side.fds_of_writer()

    def _shared(self) -> dict[str, int]:
        return {"memory": self.ring.memory_fd, "acks": self.ring.acks_fd, "space": self.ring.space_fd}

    @classmethod
    def from_fds(cls, fds: Mapping[str, int]) -> QueueHandle:
        """The handle of an end from its inherited descriptors, by name."""
        wakes = {int(name.removeprefix("wake.")): fd for name, fd in fds.items() if name.startswith("wake.")}
        ring = RingHandle(fds["memory"], fds["acks"], fds["space"], wakes)
        return cls(ring, next(side for kind in CHANNELS.values() if (side := kind.from_fds(fds)) is not None))

    def close_receiving(self) -> None:
        """Closes what only readers need in the writer's process, after the readers inherited it."""
        self.side.close_receiving()

    def close_sending(self) -> None:
        """Closes what only the writer needs in a reader's process."""
        self.side.close_sending()

    def close(self) -> None:
        self.ring.close()
        self.side.close()


def create_queue(capacity: int, num_readers: int, large_messages: str = "memfd") -> QueueHandle:
    """A queue whose ring has `capacity` bytes, a multiple of the page size. large_messages: one of `CHANNELS`.
    Raises `CapacityError`."""
    ring = create_ring(capacity, num_readers)
    try:
        return QueueHandle(ring, CHANNELS[large_messages].create(num_readers))
    except BaseException:
        ring.close()
        raise


class NearWriter(MessageWriter):
    """deaths: descriptors that become readable when a reader ends; a blocked `send` watches them."""

    def __init__(self, handle: QueueHandle, deaths: Iterable[int] = (), spin_s: float = 0.0) -> None:
        self._ring = RingWriter(handle.ring)
        self._side = handle.side.sender(sorted(handle.ring.wake_fds))
        self.events, self.sources = [handle.ring.space_fd], []
        self.waiter = Waiter(self.events, deaths, spin_s)

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        try:
            return self._ring.try_write(_INLINE, parts)
        except RecordTooLarge:
            return self._try_send_large(parts)

    def _try_send_large(self, parts: Sequence[Buffer]) -> bool:
        laid, size = layout(parts)
        if not self._ring.has_room([STUB_BYTES]):
            return False
        stub = self._side.try_send(laid, size)
        return stub is not None and self._ring.try_write(_LARGE, [stub])

    def has_room(self, parts: Sequence[Buffer]) -> bool:
        try:
            return self._ring.has_room([len(part) for part in parts])
        except RecordTooLarge:
            return self._ring.has_room([STUB_BYTES]) and self._side.has_room()

    def unread_bytes(self) -> int:
        return self._ring.unread_bytes()

    def close(self) -> None:
        self._ring.close()
        self._side.close()
        self.waiter.close()


class NearReader(MessageReader):
    """Reader `index`.

    deaths: descriptors that become readable when the writer ends; a blocked `receive` watches them.
    """

    def __init__(self, handle: QueueHandle, index: int, deaths: Iterable[int] = (), spin_s: float = 0.0) -> None:
        super().__init__(spin_s)
        deaths = list(deaths)
        self._ring = RingReader(handle.ring, index)
        self._side = handle.side.receiver(index, deaths)
        self.events, self.sources = [handle.ring.wake_fds[index]], []
        self.waiter = Waiter(self.events, deaths)
        self._inline = Message(self._ring.release)  # reused: the ring leases one record at a time
        self.has_message = self._ring.has_record
        self.spin_until = partial(self._ring.spin, num_looks=looks_per_yield(spin_s))

    def try_receive(self) -> Message | None:
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
        # The last view frees the memory. A view that outlives the lease stays valid: its memory is never written again.
        message = Message(lambda: None)
        message.parts = split(memoryview(self._side.receive(stub)))
        return message

    def close(self) -> None:
        self._ring.close()
        self._side.close()
        self.waiter.close()
