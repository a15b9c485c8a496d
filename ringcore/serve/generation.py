"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from starlette.types import Receive

from ringcore.openai_api.chat_completions import Chat
from ringcore.openai_api.completions import Completions
from ringcore.openai_api.served_model import Emit
from ringcore.serve.errors import json_response
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventStream, while_connected

__all__ = ["generate"]


async def generate(service: Service, asked: Completions | Chat, is_streamed: bool | None, receive: Receive) -> Response:
    """The answer to one request: whole, or as a stream of chunks; 429 if too many are in flight."""

    async def stream(emit: Emit) -> None:
        with service.concurrency.acquired(asked.num_prompts, asked.n):
            await asked.stream(emit)

    async def whole() -> Any:
        with service.concurrency.acquired(asked.num_prompts, asked.n):
            return await asked.whole()

    return EventStream(stream) if is_streamed else json_response(await while_connected(receive, whole()))
