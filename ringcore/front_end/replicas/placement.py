"""Which replica gets a request, now."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.replicas.replica import Replica
from ringcore.front_end.request_state import id_in_use
from ringcore.front_end.request_streams import RequestStream
from ringcore.routing.policies import ReplicaLoads, Router
from ringcore.routing.prefixes import prefix_names

__all__ = ["Placement"]


class Placement:
    """Sends requests of any thread's event loop to the replicas that a router picks."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self._replicas, self._router = replicas, router
        self._lock = threading.Lock()

    async def send(self, prepared: PreparedRequest) -> RequestStream:
        """Sends a request to an open replica, and waits for one if there is none. Raises the error that ended the last
        one, and `InvalidRequestError` for an id that is in use."""
        while True:
            await self.wait_open()
            try:
                stream = self._send(prepared)
            except EngineDeadError:  # that replica has just ended
                continue
            if stream is not None:
                return stream

    def _send(self, prepared: PreparedRequest) -> RequestStream | None:
        request = prepared.requests[0]
        is_choice = len(self._replicas) > 1
        names = prefix_names(prepared.prompt_token_ids, request.cache_salt) if is_choice else []
        with self._lock:
            if any(replica.has(prepared.request_id) for replica in self._replicas):
                raise id_in_use(prepared.request_id)
            is_open = self._are_open()
            if not any(is_open):
                return None
            loads = ReplicaLoads.of(
                is_open,
                [replica.num_unfinished for replica in self._replicas],
                [replica.num_used_blocks for replica in self._replicas],
            )
            return self._replicas[self._router.pick(names, loads)].add(prepared)

    @property
    def is_any_awake(self) -> bool:
        return any(replica.is_open and replica.is_awake for replica in self._replicas)

    def _are_open(self) -> list[bool]:
        """Of those that take requests: those awake if any is, and of these those with the newest weights."""
        candidates = [replica for replica in self._replicas if replica.is_open]
        candidates = [replica for replica in candidates if replica.is_awake] or candidates
        newest = max((replica.num_updates for replica in candidates), default=0)
        chosen = {replica.number for replica in candidates if replica.num_updates == newest}
        return [replica.number in chosen for replica in self._replicas]

    async def wait_open(self) -> None:
        """Raises the error of the last one that ended, if none is left."""
        if any(replica.is_open for replica in self._replicas):
            return
        waiting = [asyncio.ensure_future(replica.wait_open()) for replica in self._replicas]
        try:
            error: RingcoreError | None = None
            for opened in asyncio.as_completed(waiting):
                try:
                    await opened
                except RingcoreError as ended:
                    error = ended
                else:
                    return
            assert error is not None
            raise error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
