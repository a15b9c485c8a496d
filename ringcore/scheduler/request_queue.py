"""The order in which requests that wait are admitted: a scheduling policy is a key to sort them by."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ringcore.scheduler.request import Request

__all__ = ["POLICIES", "RequestQueue"]

Key = tuple[float, ...]

# policy: what a request is sorted by. Unique, as the number in the order of arrival is a part of it.
POLICIES: dict[str, Callable[[Request], Key]] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_s, request.sequence),
}


class _Entry(NamedTuple):
    key: Key
    number: int  # of the entry: no two are equal, also of a request that comes back
    request: Request


class RequestQueue:
    """Requests that wait, each once, in the order of `policy`; one that comes back stands where it stood.

    A heap, in which those taken out of the middle stay until they come to its top, or are most of it. Invariant: an
    entry counts exactly if it is the one that `_entries` has for its request.
    """

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_added = 0

    def add(self, request: Request) -> None:
        assert request.request_id not in self._entries, "the request waits already"
        entry = _Entry(self._key(request), self._num_added, request)
        self._num_added += 1
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The next one to admit, left where it is. The queue is not empty."""
        while self._entries.get(self._heap[0].request.request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].request

    def pop(self) -> Request:
        """Takes out the next one to admit. The queue is not empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> Request:
        """Takes out this one, wherever it stands. It is in the queue."""
        request = self._entries.pop(request_id).request
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())
        return request

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""
        return (entry.request for entry in sorted(self._entries.values()))
