"""The waiting queue: a scheduling policy is the key that orders its requests for admission."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ringcore.scheduler.request import Request

__all__ = ["POLICIES", "RequestQueue"]

Key = tuple[float, ...]

# policy: sort key of a request. Keys are unique, as each contains the sequence number of arrival.
POLICIES: dict[str, Callable[[Request], Key]] = {
    "fcfs": lambda request: (request.sequence,),
    "priority": lambda request: (request.priority, request.arrival_s, request.sequence),
}


# A request with its key, and a number that is unique for each entry: it breaks ties if a requeued request has an entry
# already.
_Entry: TypeAlias = tuple[Key, int, Request]


class RequestQueue:
    """The waiting requests, each once, in the order of `policy`; a requeued request gets its old place.

    A heap with lazy deletion: a removed entry stays until it reaches the top, or until removed entries are the most.
    Invariant: an entry is live exactly if it is the one that `_entries` has for its request.
    """

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_added = 0

    def add(self, request: Request) -> None:
        assert request.request_id not in self._entries, "the request waits already"
        entry = self._key(request), self._num_added, request
        self._num_added += 1
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The next request to admit, without removing it. The queue is not empty."""
        while True:
            entry = self._heap[0]
            if self._entries.get(entry[-1].request_id) is entry:
                return entry[-1]
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        """Removes the next request to admit. The queue is not empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> Request:
        """Removes this request, which is in the queue, at any place."""
        request = self._entries.pop(request_id)[-1]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())
        return request

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""
        return (entry[-1] for entry in sorted(self._entries.values()))
