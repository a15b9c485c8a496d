"""Admission of HTTP requests: the API key, the size of the body, and the number of concurrent completions."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringcore.openai_api.errors import ApiError, over_limit
from ringcore.serve.chat_page import PAGE_PATHS
from ringcore.serve.errors import error_response
from ringcore.serve.options import ServiceOptions

__all__ = ["MONITORING_PATHS", "OPEN_PATHS", "ConcurrencyLimit", "Gate"]

# Monitoring needs no key; the chat page has no secrets and asks the user for a key.
MONITORING_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
_UPLOAD = ("POST", "/v1/files")
OPEN_PATHS = MONITORING_PATHS | PAGE_PATHS


class Gate:
    """ASGI middleware: admits a request that has a valid key and whose complete body is within the limits.

    So the application never waits for a body; the only message it can still receive is the client's disconnect.
    """

    def __init__(self, app: ASGIApp, options: ServiceOptions) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key.encode()) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
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

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key:  # as Anthropic's clients send it
            scheme, key = "bearer", headers.get("x-api-key", "")
        given = _digest(key.strip().encode(errors="replace"))
        # Constant time: comparing the digests of all keys reveals nothing about a key or its length.
        matches = [hmac.compare_digest(given, digest) for digest in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "no valid API key; send one of the service's keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
