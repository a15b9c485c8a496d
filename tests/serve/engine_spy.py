"""What a service asks of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace
from running_service import RunningService

from ringcore.protocol.requests import EngineCoreRequest


@contextmanager
def seen_requests(service: RunningService) -> Iterator[list[EngineCoreRequest]]:
    """Those that are sent to the engine meanwhile, with their prompts as lists."""
    streams, seen = service.engine._streams, []
    add = streams.add

    def add_and_see(prepared):
        seen.extend(replace(one, prompt_token_ids=prepared.prompt_token_ids) for one in prepared.requests)
        return add(prepared)

    streams.add = add_and_see
    try:
        yield seen
    finally:
        del streams.add
