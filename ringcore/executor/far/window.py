"""Back-pressure of a stream between hosts, as state without I/O: how much may be sent before the reader releases it.

Positions are bytes since the stream began, as a ring's; a message counts as its own bytes and `MESSAGE_COST`.

    position    kept by    meaning                  invariant
    ----------  ---------  -----------------------  ---------------------------------------------------------------
    head        writer     sent                     head - tail <= capacity, or a quarter of it and one message
    tail        writer     known to be released     tail <= announced
    received    reader     arrived, whole           released <= received <= head
    released    reader     no longer needed         released - announced < a quarter of the capacity
    announced   reader     told to the writer

A reader announces its releases when they come to a quarter of the capacity: few frames, and none for most messages. So
a writer whose reader has released everything knows that of all but a quarter, and may always send: the message that
fits the window, or any one message beside that quarter. A writer never waits for an announcement that is not due.
"""

from __future__ import annotations

from ringcore.executor.ring_memory import RingCorruptError

__all__ = ["MESSAGE_COST", "ReceiveWindow", "SendWindow"]

MESSAGE_COST = 64  # bytes of memory that a message takes besides its own


def _fits(unread: int, size: int, capacity: int) -> bool:
    return unread + size + MESSAGE_COST <= capacity or unread < capacity // 4


class SendWindow:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.head = self.tail = 0

    def has_room(self, size: int) -> bool:
        """For a message of so many bytes."""
        return _fits(self.head - self.tail, size, self._capacity)

    def send(self, size: int) -> int:
        """The position of a message of so many bytes, which is now sent."""
        position = self.head
        self.head += size + MESSAGE_COST
        return position

    def released(self, tail: int) -> None:
        """The reader has announced this. Raises `RingCorruptError`."""
        if not self.tail <= tail <= self.head:
            raise RingCorruptError(f"{tail} bytes of a stream were released, {self.tail} before, {self.head} were sent")
        self.tail = tail


class ReceiveWindow:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.received = self.released = self._announced = 0

    def check(self, position: int, size: int) -> None:
        """A message of so many bytes begins here. Raises `RingCorruptError`: it is not the next one, or its sender
        had no room for it."""
        if position != self.received or not _fits(self.received - self.released, size, self._capacity):
            raise RingCorruptError(
                f"a message of {size} bytes at {position} of a stream, where {self.received} bytes came and "
                f"{self.released} were released"
            )

    def arrived(self, size: int) -> None:
        self.received += size + MESSAGE_COST

    def release(self, size: int) -> int | None:
        """The oldest message, of so many bytes, is no longer needed. The position to announce, if that is due."""
        self.released += size + MESSAGE_COST
        if self.released - self._announced < self._capacity // 4:
            return None
        self._announced = self.released
        return self.released
