"""Streamed completions over HTTP/1.1, read at little cost: a load generator must not be what limits a service.

A library's client takes longer for an event than a service does for a token. Here what arrives is cut into events and
stamped with its time; what the events say is read when the load is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Event", "HttpError", "complete", "read_answer"]

_DATA, _DONE = b"data: ", b"[DONE]"
Event = tuple[float, bytes]  # when it came (time.perf_counter), and what it says


class HttpError(Exception):
    """A service that did not answer as it should."""


@dataclass(frozen=True)
class Answer:
    """One completion: when each event with text came, in seconds of `time.perf_counter`, the first first."""

    text_s: list[float]
    text: str
    prompt_tokens: int
    completion_tokens: int


async def complete(port: int, path: str, body: Mapping[str, Any]) -> list[Event]:
    """Posts to a service of this host; the events of its answer, for `read_answer`. Raises `HttpError`, `OSError`.

    Every request has a connection of its own: one that is kept may be closed by its service at any moment.
    """
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    transport, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
    try:
        transport.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        return await connection.answer
    finally:
        transport.abort()


class _Connection(asyncio.Protocol):
    """One request: the head of its answer, then chunks (or a body of a known length, of an error)."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[list[Event]] = asyncio.get_running_loop().create_future()
        self._head: bytes | None = None
        self._is_chunked = False
        self._body_length = 0
        self._unread, self._body = b"", b""  # as it came; without the framing, up to the last whole event
        self._events: list[Event] = []

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(HttpError(f"the service closed the connection within an answer: {exc}"))

    def _fail(self, error: HttpError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may wait for it any more

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._unread += data
        try:
            is_over = (self._head is not None or self._read_head()) and self._read_body(now)
        except (HttpError, ValueError, IndexError) as error:
            self._fail(error if isinstance(error, HttpError) else HttpError(f"no answer by HTTP/1.1: {error!r}"))
            return
        if is_over and not self.answer.done():
            self.answer.set_result(self._events)

    def _read_head(self) -> bool:
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        if not end:
            return False
        self._head, self._unread = head, rest
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        self._is_chunked = fields.get(b"transfer-encoding", b"").strip() == b"chunked"
        self._body_length = int(fields.get(b"content-length", b"0"))
        return True

    def _read_body(self, now: float) -> bool:
        """Whether the answer is whole. Its events have come `now`."""
        is_over = self._read_chunks() if self._is_chunked else self._read_plain()
        assert self._head is not None
        status = self._head.split(b" ", 2)[1]
        if status != b"200":
            if is_over:
                raise HttpError(f"status {status.decode()}: {self._body[:500].decode(errors='replace')}")
            return False
        *events, self._body = self._body.split(b"\n\n")
        self._events += [(now, event.removeprefix(_DATA)) for event in events]
        return is_over

    def _read_plain(self) -> bool:
        self._body += self._unread
        self._body_length -= len(self._unread)
        self._unread = b""
        return self._body_length <= 0

    def _read_chunks(self) -> bool:
        """Whether the chunk that says so has come."""
        unread, at, parts = self._unread, 0, [self._body]
        is_over = False
        while (line_end := unread.find(b"\r\n", at)) >= 0:
            size = int(unread[at:line_end], 16)
            end = line_end + 2 + size + 2
            if end > len(unread):
                break
            parts.append(unread[line_end + 2 : end - 2])
            at = end
            if size == 0:
                is_over = True
                break
        self._unread, self._body = unread[at:], b"".join(parts)
        return is_over


def read_answer(events: list[Event]) -> Answer:
    """What the events of a streamed completion say. Raises `HttpError` where they are no whole answer."""
    if not events or events[-1][1] != _DONE:
        raise HttpError(f"an answer ended with {events[-1:]!r}, not with {_DONE!r}")
    text_s, texts, usage = [], [], None
    for at_s, data in events[:-1]:
        value = json.loads(data)
        if "error" in value:
            raise HttpError(f"an answer broke off: {value['error']}")
        usage = value.get("usage") or usage
        text = "".join(_text(choice) for choice in value["choices"])
        if text:
            text_s.append(at_s)
            texts.append(text)
    if usage is None or not text_s:
        raise HttpError(f"an answer without {'usage' if usage is None else 'text'}")
    return Answer(text_s, "".join(texts), usage["prompt_tokens"], usage["completion_tokens"])


def _text(choice: Mapping[str, Any]) -> str:
    """Of a completion's choice, or of a chat's."""
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
