"""What a service asks of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from running_service import RunningService

from ringcore.protocol.requests import EngineCoreRequest


@contextmanager
def seen_requests(service: RunningService) -> Iterator[list[EngineCoreRequest]]:
    """Those that are sent to the engine meanwhile."""
    streams, seen = service.engine._streams, []
    add = streams.add

    def add_and_see(prepared):
        seen.extend(prepared.requests)
        return add(prepared)

    streams.add = add_and_see
    try:
        yield seen
    finally:
        del streams.add
