"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive

from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.served_model import Emit
from ringcore.serve.errors import json_response
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventStream, while_connected

__all__ = ["acquired", "generate"]


async def generate(service: Service, asked: Completions | Chat, is_streamed: bool | None, receive: Receive) -> Response:
    """The answer to one request: whole, or as a stream of chunks; 429 if too many are in flight."""

    async def stream(emit: Emit) -> None:
        with acquired(service, asked):
            await asked.stream(emit)

    async def whole() -> Any:
        with acquired(service, asked):
            return await asked.whole()

    return EventStream(stream) if is_streamed else json_response(await while_connected(receive, whole()))


def acquired(service: Service, asked: Completions | Chat) -> AbstractContextManager[None]:
    """Counts its completions as in flight; raises 429 if there are too many."""
    return service.concurrency.acquired(asked.num_prompts, asked.n)
