"""Requests whose prefix is being loaded from a store: they wait beside the step, outside the waiting queue."""

from __future__ import annotations

from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import RequestQueue

__all__ = ["LoadingRequests"]


class LoadingRequests:
    """By load those that wait for it; when it has ended they return to their place in the queue `waiting`.

    Invariant: a request is in `_load_of` exactly if it is in `_requests` of that load.
    """

    def __init__(self, waiting: RequestQueue) -> None:
        self._waiting = waiting
        self._requests: dict[int, dict[str, Request]] = {}
        self._load_of: dict[str, int] = {}  # by request id

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._load_of

    def __len__(self) -> int:
        return len(self._load_of)

    def add(self, load: int, request: Request) -> None:
        """The request, which is not in the queue, waits for this load."""
        request.has_loaded = True
        self._load_of[request.request_id] = load
        self._requests.setdefault(load, {})[request.request_id] = request

    def discard(self, request: Request) -> None:
        """It waits no more; the load goes on."""
        load = self._load_of.pop(request.request_id, None)
        if load is not None:
            del self._requests[load][request.request_id]

    def release(self, load: int) -> None:
        """The load has ended."""
        for request in self._requests.pop(load, {}).values():
            del self._load_of[request.request_id]
            self._waiting.add(request)

    def release_all(self) -> None:
        """The workers are lost, and every load with them."""
        for load in list(self._requests):
            self.release(load)

    def check(self) -> dict[str, Request]:
        """Asserts the invariant, for tests; -> all of them by id."""
        by_id = {id_: request for own in self._requests.values() for id_, request in own.items()}
        assert by_id.keys() == self._load_of.keys(), "a request is lost while it loads"
        assert all(id_ in self._requests[load] for id_, load in self._load_of.items()), "it waits for another load"
        return by_id
