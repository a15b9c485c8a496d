"""Requests whose prefix is being loaded from a store: they wait beside the step, outside the waiting queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.kv_cache.manager import CachedPrefix
from ringcore.protocol.stored_kv import StoredKVStats
from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.running import RunningRequests

__all__ = ["LoadingRequests"]


class LoadingRequests:
    """By load those that wait for it; when it has ended they return to their place in the queue `waiting`.

    `clock` gives seconds on the host's monotonic clock.

    Invariant: a request is in `_load_of` exactly if it is in `_requests` of that load.
    """

    def __init__(self, waiting: RequestQueue, running: RunningRequests, clock: Callable[[], float]) -> None:
        self._waiting, self._running, self._clock = waiting, running, clock
        self._requests: dict[int, dict[str, Request]] = {}
        self._load_of: dict[str, int] = {}  # by request id

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._load_of

    def __len__(self) -> int:
        return len(self._load_of)

    @property
    def in_flight(self) -> list[int]:
        """The loads that have not ended, whether a request waits for them or not."""
        stored = self._running.kv_cache.stored
        return [] if stored is None else stored.in_flight

    def begin(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether the request, which is not in the queue, waits from now on for a load of what a store has after
        `prefix`. There is a store. A request waits once before each start: what is evicted meanwhile is computed.
        """
        if request.has_loaded or request.needs_whole_prompt:
            return False
        kv_cache, tokens = self._running.kv_cache, request.tokens
        num_blocks = kv_cache.blocks_needed(request.num_tokens_to_hold)
        assert kv_cache.stored is not None, "there is no store"
        load = kv_cache.stored.begin(request.block_hashes, tokens, num_blocks, prefix, self._clock())
        if load is None:
            return False
        request.has_loaded = True
        self._load_of[request.request_id] = load
        self._requests.setdefault(load, {})[request.request_id] = request
        return True

    def finish(self, load: int, is_loaded: Sequence[bool]) -> None:
        """The load has ended on every rank; is_loaded: by block, in the order of its names."""
        stored = self._running.kv_cache.stored
        assert stored is not None, "there is no store"
        stored.finish(load, is_loaded, self._clock())
        self._release(load)

    def _release(self, load: int) -> None:
        for request in self._requests.pop(load, {}).values():
            del self._load_of[request.request_id]
            self._waiting.add(request)

    def release_all(self) -> None:
        """The workers are lost, and every load with them."""
        for load in list(self._requests):
            self._release(load)

    def discard(self, request: Request) -> None:
        """It waits no more; the load goes on."""
        load = self._load_of.pop(request.request_id, None)
        if load is not None:
            del self._requests[load][request.request_id]

    def stats(self) -> StoredKVStats | None:
        """None without a store."""
        stored = self._running.kv_cache.stored
        return None if stored is None else StoredKVStats(*stored.counts())

    def check(self) -> dict[str, Request]:
        """Asserts the invariant, for tests; -> all of them by id."""
        by_id = {id_: request for own in self._requests.values() for id_, request in own.items()}
        assert by_id.keys() == self._load_of.keys(), "a request is lost while it loads"
        assert all(id_ in self._requests[load] for id_, load in self._load_of.items()), "it waits for another load"
        return by_id
