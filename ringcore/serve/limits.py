"""Admission of HTTP requests: the key, the size of the body, and the number of concurrent completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringcore.openai_api.errors import ApiError, over_limit
from ringcore.serve.access import Access
from ringcore.serve.errors import error_response
from ringcore.serve.options import ServiceOptions

__all__ = ["ConcurrencyLimit", "Gate"]

_UPLOAD = ("POST", "/v1/files")


class Gate:
    """ASGI middleware: admits a request that has a valid key and whose complete body is within the limits.

    So the application never waits for a body; the only message it can still receive is the client's disconnect.
    """

    def __init__(self, app: ASGIApp, options: ServiceOptions) -> None:
        self._app = app
        self._options = options
        self._access = Access(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._access.check(scope, headers)
            if self._options.batch_dir is not None and (scope["method"], scope["path"]) == _UPLOAD:
                await self._app(scope, self._timed(receive), send)
                return
            self._check_length(headers)
            body = await self._read_body(receive)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _timed(self, receive: Receive) -> Receive:
        """For a body that is read as it comes, within bounds of the endpoint: none of its pieces may take too long."""

        async def next_piece() -> Message:
            try:
                async with asyncio.timeout(self._options.body_timeout_s):
                    return await receive()
            except TimeoutError:
                raise self._too_slow() from None

        return next_piece

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._options.max_body_bytes:
            raise self._too_large()

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnected before."""
        chunks, num_bytes = [], 0
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    if num_bytes > self._options.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not arrive within {self._options.body_timeout_s} s; send it faster",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than max_body_bytes={self._options.max_body_bytes}; send less, or raise that option",
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, and then delegates."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class ConcurrencyLimit:
    """Limits the completions in flight (back-pressure by 429).

    Invariant: 0 <= num_in_flight <= the limit; a request releases exactly its own share, on success and on error.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self.num_in_flight = 0

    @contextmanager
    def acquired(self, num_prompts: int, n: int) -> Iterator[None]:
        """Counts n completions of each prompt; raises 429 if too many are in flight, 400 if they can never fit."""
        num, limit = num_prompts * n, self._options.max_concurrent_requests
        if num > limit:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{num_prompts} prompts with n={n} are {num} completions and the service allows {limit} at once; "
                "send fewer, or raise max_concurrent_requests",
                param="prompt",
            )
        if self.num_in_flight + num > limit:
            raise over_limit(self.num_in_flight, limit)
        self.num_in_flight += num
        try:
            yield
        finally:
            self.num_in_flight -= num
