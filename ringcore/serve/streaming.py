"""Cancellation of responses when their client disconnects, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ringcore.errors import RingcoreError
from ringcore.openai_api.errors import ApiError, api_error_of
from ringcore.openai_api.served_model import Emit

__all__ = ["ClientLeftError", "EventForm", "EventStream", "while_connected"]

T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientLeftError(ApiError):
    """The client has disconnected; this error is never sent."""

    def __init__(self) -> None:
        super().__init__(_CLIENT_CLOSED_REQUEST, "the client disconnected")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A disconnect of the client cancels it and raises `ClientLeftError`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class EventForm:
    """How the events of a stream are written; by default as OpenAI's completions are.

    error: the value of an event that tells of an error. is_named: the `type` of each value is the name of its event.
    end: what follows the last event.
    """

    error: Callable[[ApiError], Any] = ApiError.body
    is_named: bool = False
    end: bytes = b"data: [DONE]\n\n"

    def event(self, value: Any) -> bytes:
        data = b"data: " + msgspec.json.encode(value) + b"\n\n"
        return b"event: " + value["type"].encode() + b"\n" + data if self.is_named else data


class EventStream(Response):
    """Sends what `produce` emits as server-sent events, until the client disconnects.

    An error before the first event is a response with its own status; a later one is sent as the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Coroutine[Any, Any, None]], form: EventForm) -> None:
        super().__init__()
        self._produce, self._form = produce, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeftError):
            await while_connected(receive, _Events(send, self._form).run(self._produce))


class _Events:
    """The events of one response. Several tasks may emit: events are not interleaved, and the head is sent first."""

    def __init__(self, send: Send, form: EventForm) -> None:
        self._send, self._form = send, form
        self._head_lock = asyncio.Lock()
        self._is_started = self._has_head = False  # the head is being sent, or was; it was

    async def run(self, produce: Callable[[Emit], Coroutine[Any, Any, None]]) -> None:
        try:
            await produce(self._emit)
        except Exception as error:
            if not self._is_started:
                raise
            await self._emit(self._form.error(api_error_of(error)))
            await self._end()
            if not isinstance(error, RingcoreError | ApiError):
                raise  # our bug: the server logs it
            return
        await self._end()

    async def _emit(self, value: Any) -> None:
        event = self._form.event(value)
        if not self._has_head:
            async with self._head_lock:
                await self._send_head()
        # Back-pressure: it waits for a slow client, while the front end merges outputs.
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_head(self) -> None:
        if not self._is_started:
            self._is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._has_head = True

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": self._form.end, "more_body": False})
