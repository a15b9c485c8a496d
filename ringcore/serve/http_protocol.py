"""HTTP on one connection: uvicorn's protocol with deadlines, a bound on heads, and errors in OpenAI's form.

| state of a connection | begins with | ends at the latest |
|---|---|---|
| waits for its first head | the connection | after `header_timeout_s`; in the reserve after 2 s |
| waits for a further head | a byte that follows an answer | after `header_timeout_s` |
| busy | a whole head | as the application decides |
| idle | the end of an answer | after `keep_alive_timeout_s` |
| an answer waits to be sent | a full buffer, or the end | when the peer has taken nothing for `send_timeout_s` |
| refused | an error that this protocol answers itself | after `_LINGER_S`, in which the peer may read it |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ringcore.serve.connections import Connections, State
from ringcore.serve.errors import ApiError
from ringcore.serve.limits import WATCH_PATHS
from ringcore.serve.options import ServiceOptions

__all__ = ["HttpProtocol"]

_RESERVED_HEAD_S = 2.0
_LINGER_S = 2.0
_MAX_PIPELINED = 16  # requests that wait for the answer to the one before
_METHODS = "GET, HEAD, POST, OPTIONS"
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?= |$)")


class HttpProtocol(HttpToolsProtocol):
    """One connection of a service. Whatever is wrong with what it receives is told to the peer, and not logged."""

    def __init__(self, *args: Any, connections: Connections, options: ServiceOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._options = options
        self._refusal: ApiError | None = None  # of all requests but those that watch: it is in the reserve
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None  # while the peer is slow to take an answer
        self._is_refused = False
        self._num_head_bytes = 0  # received since the last byte of a body, or the last request's end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refusal = self._connections.admit(self, self.client[0] if self.client else "")
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._forget_sending()
        self._connections.remove(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._deadline is None and not self._is_busy():
            self._expect_head()
        self._unset_keepalive_if_required()
        self._num_head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error, data))
            return
        if self._num_head_bytes > self._options.max_header_bytes:
            self._refuse(self._head_too_large())

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]  # another protocol is only offered: HTTP goes on

    # Callbacks of the parser: what they raise, `_parse` raises as the context of an `HttpParserCallbackError`.

    def on_headers_complete(self) -> None:
        self._check_head()
        self._forget_deadline()
        super().on_headers_complete()
        self._connections.set_state(self, State.BUSY)
        if self._refusal is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def _check_head(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._options.max_header_bytes:
            raise self._head_too_large()
        if self.parser.get_method() == b"CONNECT":
            raise _method_not_allowed("CONNECT")
        if self._refusal is not None and self.url.partition(b"?")[0].decode("latin-1") not in WATCH_PATHS:
            raise self._refusal
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _bad_request(f"more than {_MAX_PIPELINED} requests wait for an answer on one connection")  # it ends

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy():
            self._connections.set_state(self, State.IDLE)
        if self.transport.is_closing():
            self._watch_sending()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._forget_sending()

    def _is_busy(self) -> bool:
        """Whether an answer is under way; `cycle` is the last request, which is answered last."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        seconds = self._options.header_timeout_s
        self._arm(min(seconds, _RESERVED_HEAD_S) if self._refusal else seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._num_head_bytes:
            text = f"the head did not arrive within header_timeout_s={self._options.header_timeout_s}; send it faster"
            self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, text))
        else:  # nothing was asked
            self.transport.abort()

    def _head_too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the head is larger than max_header_bytes={self._options.max_header_bytes}; send fewer or shorter headers",
        )

    def _refuse(self, error: ApiError) -> None:
        """The last answer on this connection. It is closed once the peer has had the time to read it."""
        self._is_refused = True
        self._forget_deadline()
        self._connections.set_state(self, State.IDLE)
        if self._is_busy():
            if self.cycle.response_started or self.pipeline:  # what is written now would be a part of an answer
                self.transport.abort()
                return
            self.cycle.disconnected = True  # its answer is this one
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        self.transport.write(self._written(error))
        self.transport.write_eof()
        self._arm(_LINGER_S, self.transport.abort)

    def _written(self, error: ApiError) -> bytes:
        content = msgspec.json.encode(error.body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
            *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
        ]
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        return b"".join([head, *(b"%b: %b\r\n" % header for header in headers), b"\r\n", content])

    def _watch_sending(self, num_unsent: int | None = None) -> None:
        """While nothing is added to what is to be sent. num_unsent: the bytes that were left `send_timeout_s` ago."""
        self._forget_sending()
        num_left = self.transport.get_write_buffer_size()
        if num_unsent is not None and num_left >= num_unsent:
            self.transport.abort()
        elif num_left:
            self._sending = self.loop.call_later(self._options.send_timeout_s, self._watch_sending, num_left)

    def _forget_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, act)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _refusal_of(error: httptools.HttpParserError, data: bytes) -> ApiError:
    if isinstance(error.__context__, ApiError):
        return error.__context__
    method = _METHOD.match(data)
    if isinstance(error, httptools.HttpParserInvalidMethodError) and method is not None:
        return _method_not_allowed(method[0][:32].decode("ascii"))
    if isinstance(error, httptools.HttpParserCallbackError):  # of uvicorn's: the target is no URL
        return _bad_request("the target of the request is no valid URL")
    return _bad_request(str(error))


def _bad_request(reason: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"what was received is no request of HTTP/1.1: {reason}")


def _method_not_allowed(method: str) -> ApiError:
    text = f"the method {method!r} is not served; use one of {_METHODS}"
    return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, text, headers={"Allow": _METHODS})
