"""The order in which requests that wait are admitted. A scheduling policy is a `RequestQueue`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from ringcore.scheduler.request import Request

__all__ = ["FCFSQueue", "RequestQueue"]


class RequestQueue(ABC):
    """Requests that wait, each once. Iteration and `pop` go in the order of admission and agree with each other."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Takes in a request that arrived."""

    @abstractmethod
    def add_front(self, request: Request) -> None:
        """Takes back a request that was admitted before every other one here."""

    @abstractmethod
    def peek(self) -> Request:
        """The next one to admit, left where it is. The queue is not empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Takes out the next one to admit. The queue is not empty."""

    @abstractmethod
    def remove(self, request_id: str) -> Request:
        """Takes out this one, wherever it stands. It is in the queue."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(RequestQueue):
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        assert request.request_id not in self._requests, "the request waits already"
        self._requests[request.request_id] = request

    def add_front(self, request: Request) -> None:
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request:
        return self._requests.pop(request_id)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
