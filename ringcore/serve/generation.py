"""The answers of all endpoints that generate text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive

from ringcore.openai_api.served_model import Emit
from ringcore.serve.errors import json_response
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventForm, EventStream, while_connected

__all__ = ["Asked", "Counted", "acquired", "answer", "generate"]


class Counted(Protocol):
    """One body that asks for n completions of each prompt."""

    @property
    def num_prompts(self) -> int: ...

    @property
    def n(self) -> int: ...

    async def whole(self) -> Any: ...


class Asked(Counted, Protocol):
    """One body that asks for text, whole or streamed."""

    async def stream(self, emit: Emit) -> None: ...


async def generate(
    service: Service, asked: Asked, is_streamed: bool | None, receive: Receive, form: EventForm | None = None
) -> Response:
    """The answer to one request: whole, or as a stream of events of this form; 429 if too many are in flight."""

    async def stream(emit: Emit) -> None:
        with acquired(service, asked):
            await asked.stream(emit)

    return EventStream(stream, form or EventForm()) if is_streamed else await answer(service, asked, receive)


async def answer(service: Service, asked: Counted, receive: Receive) -> Response:
    """The whole answer to one request; 429 if too many are in flight."""

    async def whole() -> Any:
        with acquired(service, asked):
            return await asked.whole()

    return json_response(await while_connected(receive, whole()))


def acquired(service: Service, asked: Counted) -> AbstractContextManager[None]:
    """Counts its completions as in flight; raises 429 if there are too many."""
    return service.concurrency.acquired(asked.num_prompts, asked.n)
