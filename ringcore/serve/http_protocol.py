"""HTTP on one connection: uvicorn's protocol with timeouts, a limit of the request head, and errors in OpenAI's form.

| state of a connection | begins with | deadline |
|---|---|---|
| waits for its first head | the connection | `header_timeout_s`; in the reserve 2 s |
| waits for another head | the first byte after a response | `header_timeout_s` |
| busy | a complete head | set by the application |
| idle (keep-alive) | the end of a response | `keep_alive_timeout_s` |
| unsent bytes (back-pressure) | a full buffer, or the end of the response | `send_timeout_s` without progress |
| refused | an error that this protocol answers itself | `_LINGER_S`, for the peer to read it |
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

from ringcore.openai_api.errors import ApiError
from ringcore.serve.access import MONITORING_PATHS
from ringcore.serve.connections import Connections, State
from ringcore.serve.options import ServiceOptions

__all__ = ["HttpProtocol"]

_RESERVED_HEAD_S = 2.0
_LINGER_S = 2.0
_MAX_PIPELINED = 16  # pipelined requests that wait for earlier responses
_METHODS = "GET, HEAD, POST, OPTIONS"
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?= |$)")


class HttpProtocol(HttpToolsProtocol):
    """One connection of a service. Protocol errors are answered to the peer and not logged."""

    def __init__(self, *args: Any, connections: Connections, options: ServiceOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._options = options
        self._refusal: ApiError | None = None  # set in the reserve: the answer to all but monitoring requests
        self._deadline: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None  # while the peer is slow to read a response
        self._is_refused = False
        self._num_head_bytes = 0  # received since the last byte of a body, or the end of the last request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refusal = self._connections.admit(self, self.client[0] if self.client else "")
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_send_timeout()
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
                rest = rest[upgrade.args[0] :]  # ignore the offered upgrade and continue with HTTP

    # Callbacks of the parser: `_parse` raises their errors as the context of an `HttpParserCallbackError`.

    def on_headers_complete(self) -> None:
        self._check_head()
        self._cancel_deadline()
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
        if self._refusal is not None and self.url.partition(b"?")[0].decode("latin-1") not in MONITORING_PATHS:
            raise self._refusal
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _bad_request(f"more than {_MAX_PIPELINED} requests wait for an answer on one connection")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy():
            self._connections.set_state(self, State.IDLE)
        if self.transport.is_closing():
            self._arm_send_timeout()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._arm_send_timeout()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_send_timeout()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_send_timeout()

    def _is_busy(self) -> bool:
        """Whether a response is incomplete; `cycle` is the last request, which is answered last."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        seconds = self._options.header_timeout_s
        self._set_deadline(min(seconds, _RESERVED_HEAD_S) if self._refusal else seconds, self._head_timed_out)

    def _head_timed_out(self) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._num_head_bytes:
            text = f"the head did not arrive within header_timeout_s={self._options.header_timeout_s}; send it faster"
            self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, text))
        else:  # no request has begun
            self.transport.abort()

    def _head_too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the head is larger than max_header_bytes={self._options.max_header_bytes}; send fewer or shorter headers",
        )

    def _refuse(self, error: ApiError) -> None:
        """Sends the last response on this connection, and closes it after the linger time."""
        self._is_refused = True
        self._cancel_deadline()
        self._connections.set_state(self, State.IDLE)
        if self._is_busy():
            if self.cycle.response_started or self.pipeline:  # the error would be part of another response
                self.transport.abort()
                return
            self.cycle.disconnected = True  # this error replaces its response
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        self.transport.write(self._encode_error(error))
        self.transport.write_eof()
        self._set_deadline(_LINGER_S, self.transport.abort)

    def _encode_error(self, error: ApiError) -> bytes:
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

    def _arm_send_timeout(self, num_unsent: int | None = None) -> None:
        """Aborts the connection if the peer reads nothing for `send_timeout_s`, while the write buffer does not grow.
        num_unsent: the buffer's bytes at the previous check."""
        self._cancel_send_timeout()
        num_left = self.transport.get_write_buffer_size()
        if num_unsent is not None and num_left >= num_unsent:
            self.transport.abort()
        elif num_left:
            self._send_timer = self.loop.call_later(self._options.send_timeout_s, self._arm_send_timeout, num_left)

    def _cancel_send_timeout(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _set_deadline(self, seconds: float, act: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, act)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _refusal_of(error: httptools.HttpParserError, data: bytes) -> ApiError:
    if isinstance(error.__context__, ApiError):
        return error.__context__
    method = _METHOD.match(data)
    if isinstance(error, httptools.HttpParserInvalidMethodError) and method is not None:
        return _method_not_allowed(method[0][:32].decode("ascii"))
    if isinstance(error, httptools.HttpParserCallbackError):  # from uvicorn: the target is not a URL
        return _bad_request("the target of the request is not a valid URL")
    return _bad_request(str(error))


def _bad_request(reason: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"not a valid HTTP/1.1 request: {reason}")


def _method_not_allowed(method: str) -> ApiError:
    text = f"the method {method!r} is not served; use one of {_METHODS}"
    return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, text, headers={"Allow": _METHODS})
