"""Connection limits of a service, and the eviction of connections when a limit is reached."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Protocol

from ringcore.openai_api.errors import ApiError
from ringcore.serve.descriptors import NUM_RESERVED
from ringcore.serve.rate_limited_log import RateLimitedLog

__all__ = ["Connection", "Connections", "State"]

_log = logging.getLogger(__name__)

_LOG_PERIOD_S = 10.0


class State(Enum):
    """What a connection waits for, in order of eviction."""

    AWAITING_HEAD = "its first head, which has not arrived whole"
    IDLE = "a further request, or its end"
    BUSY = "the answer to a request"


class Connection(Hashable, Protocol):
    def evict(self) -> None:
        """Closes it. Its descriptor is free one iteration of the event loop later."""


class _Bound:
    """At most `limit` connections, each in one state, in LRU order per state. `name`: of the option."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self._by_state: dict[State, dict[Connection, None]] = {state: {} for state in State}

    def __len__(self) -> int:
        return sum(map(len, self._by_state.values()))

    def put(self, connection: Connection, state: State) -> None:
        self._by_state[state][connection] = None

    def remove(self, connection: Connection, state: State) -> None:
        del self._by_state[state][connection]

    def oldest(self, *states: State) -> Connection | None:
        """The oldest connection of the first of these states that has one."""
        return next((connection for state in states for connection in self._by_state[state]), None)


@dataclass(slots=True)
class _Member:
    state: State
    bounds: tuple[_Bound, ...]  # the limits that it counts towards
    peer: str


class Connections:
    """Counts connections, in total and per peer address, and evicts connections for new ones.

    A new connection beyond a limit evicts the one that has waited longest for its first head, else the one that has
    been idle longest, so a flood of slow heads evicts only its own connections. If all are busy, the new one goes into
    a small reserve, which evicts its oldest connection in any state. Requests in the reserve are refused, except those
    to /health and /metrics.

    Invariant: each bound holds at most its limit, and a member connection is in each of its bounds once.
    """

    def __init__(self, max_connections: int, max_connections_per_peer: int | None) -> None:
        self._max_per_peer = max_connections_per_peer
        self._all = _Bound("max_connections", max_connections)
        self._reserve = _Bound("reserve", NUM_RESERVED)
        self._by_peer: dict[str, _Bound] = {}
        self._members: dict[Connection, _Member] = {}
        self._log = RateLimitedLog(_log, _LOG_PERIOD_S)

    def __len__(self) -> int:
        return len(self._members)

    def admit(self, connection: Connection, peer: str) -> ApiError | None:
        """Adds a new connection. Returns the error for its requests if it is in the reserve."""
        own = self._own_bound(peer)
        if own is not None and not self._make_room(own):
            refusal = _too_many_of_peer(own.limit)
        elif not self._make_room(self._all):
            refusal = _too_many(self._all.limit)
        elif own is None:
            self._add(connection, peer, self._all)
            return None
        else:
            self._by_peer[peer] = own  # again: an eviction that left it empty has removed it
            self._add(connection, peer, self._all, own)
            return None
        self._make_room(self._reserve)
        self._add(connection, peer, self._reserve)
        return refusal

    def set_state(self, connection: Connection, state: State) -> None:
        """No effect on an evicted connection, and in the reserve, which evicts in order of arrival."""
        member = self._members.get(connection)
        if member is None or self._reserve in member.bounds:
            return
        for bound in member.bounds:
            bound.remove(connection, member.state)
            bound.put(connection, state)
        member.state = state

    def remove(self, connection: Connection) -> None:
        """The connection is closed; it may have been evicted before."""
        member = self._members.pop(connection, None)
        if member is None:
            return
        for bound in member.bounds:
            bound.remove(connection, member.state)
        if member.peer in self._by_peer and not self._by_peer[member.peer]:
            del self._by_peer[member.peer]

    def _own_bound(self, peer: str) -> _Bound | None:
        if self._max_per_peer is None:
            return None
        return self._by_peer.get(peer) or _Bound("max_connections_per_peer", self._max_per_peer)

    def _add(self, connection: Connection, peer: str, *bounds: _Bound) -> None:
        self._members[connection] = _Member(State.AWAITING_HEAD, bounds, peer)
        for bound in bounds:
            bound.put(connection, State.AWAITING_HEAD)

    def _make_room(self, bound: _Bound) -> bool:
        """Evicts a connection if the limit is reached; returns whether there is room for one more."""
        if len(bound) < bound.limit:
            return True
        self._log.warning(
            f"{bound.name}={bound.limit} connections are open: waiting ones are closed, or new ones refused"
        )
        oldest = bound.oldest(State.AWAITING_HEAD, State.IDLE)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.evict()
        return True


def _too_many(limit: int) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"max_connections={limit} connections are in use; try again in a second",
        "server_error",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


def _too_many_of_peer(limit: int) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"max_connections_per_peer={limit} connections of your address are in use; close one, or try again in a second",
        "rate_limit_error",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )
