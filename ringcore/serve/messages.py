"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ringcore.anthropic_api.answers import MessageResponse, MessagesError, TokenCount
from ringcore.anthropic_api.errors import error_body
from ringcore.anthropic_api.messages import Messages, count_tokens
from ringcore.anthropic_api.schema import CountTokensRequest, MessagesRequest
from ringcore.serve.errors import Described, described, json_response
from ringcore.serve.generation import generate
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventForm, while_connected

__all__ = ["MESSAGE_EVENTS", "add_messages"]

MESSAGE_EVENTS = EventForm(error=error_body, is_named=True, end=b"")
_ERRORS: Described = {"4XX": {"model": MessagesError}, "5XX": {"model": MessagesError}}


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", responses=described(MessageResponse, "text/event-stream") | _ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        service.check_started()
        return await generate(service, Messages(service.model, body), body.stream, request.receive, MESSAGE_EVENTS)

    @app.post("/v1/messages/count_tokens", responses=described(TokenCount) | _ERRORS)
    async def count_tokens_(body: CountTokensRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, count_tokens(service.model, body)))
