"""The waiting queue: a priority queue whose scheduling policy is a sort key."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ringcore.scheduler.request import Request

__all__ = ["POLICIES", "RequestQueue"]

Key = tuple[float, ...]

# policy: sort key of a request. Unique, as the arrival number is a part of it.
POLICIES: dict[str, Callable[[Request], Key]] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_s, request.sequence),
}


class _Entry(NamedTuple):
    key: Key
    number: int  # unique per entry, also of a request that is queued again
    request: Request


class RequestQueue:
    """The waiting requests, each once, in the order of `policy`; a preempted request returns to its former place.

    A heap with lazy deletion: entries removed from the middle stay until they reach the top, or are more than half of
    it. Invariant: an entry is live exactly if `_entries` maps its request to it.
    """

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_added = 0

    def add(self, request: Request) -> None:
        assert request.request_id not in self._entries, "the request is queued already"
        entry = _Entry(self._key(request), self._num_added, request)
        self._num_added += 1
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The head of the queue, not removed. The queue must not be empty."""
        while self._entries.get(self._heap[0].request.request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].request

    def pop(self) -> Request:
        """Removes and returns the head of the queue. The queue must not be empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> Request:
        """Removes a request from any place. It must be in the queue."""
        request = self._entries.pop(request_id).request
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())
        return request

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In queue order."""
        return (entry.request for entry in sorted(self._entries.values()))
