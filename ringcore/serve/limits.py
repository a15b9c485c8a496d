"""What stands before the endpoints: the API key, the size of a body, and how many completions are under way."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringcore.serve.chat_page import PAGE_PATHS
from ringcore.serve.errors import ApiError, over_limit
from ringcore.serve.options import ServiceOptions

__all__ = ["OPEN_PATHS", "WATCH_PATHS", "Gate", "Places"]

# What watches a service has no key, and the page, which holds no secret, asks for one.
WATCH_PATHS = frozenset({"/health", "/metrics"})
OPEN_PATHS = WATCH_PATHS | PAGE_PATHS


class Gate:
    """Lets a request in that brings a key, and whose body has arrived whole within the bounds.

    So the application never waits for a body, and what it receives afterwards is only that the client has left.
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
            self._check_length(headers)
            body = await self._read_body(receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode(errors="replace"))
        # Digests are compared, all of them: the time taken tells nothing of a key, nor of its length.
        matches = [hmac.compare_digest(given, digest) for digest in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "no valid API key; send one of the service's keys as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._options.max_body_bytes:
            raise self._too_large()

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client left before it was sent."""
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
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not arrive within {self._options.body_timeout_s} s; send it faster",
                headers={"Connection": "close"},
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than max_body_bytes={self._options.max_body_bytes}; send less, or raise that option",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, and then what comes."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class Places:
    """The completions that may be under way at once.

    Invariant: 0 <= num_taken <= the limit; whoever took places gives back exactly these, however it ends.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self.num_taken = 0

    @contextmanager
    def taken(self, prompts: Sequence[object], n: int) -> Iterator[None]:
        """Places for n completions of each prompt; raises 429 where there are too few now, and 400 for ever."""
        num, limit = len(prompts) * n, self._options.max_concurrent_requests
        if num > limit:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{len(prompts)} prompts with n={n} are {num} completions and the service takes {limit} at once; "
                "send fewer, or raise max_concurrent_requests",
                param="prompt",
            )
        if self.num_taken + num > limit:
            raise over_limit(self.num_taken, limit)
        self.num_taken += num
        try:
            yield
        finally:
            self.num_taken -= num
