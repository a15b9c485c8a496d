"""Streams of a service with OpenAI's interface, read at little cost: a load's client must not be what limits a service.

aiohttp, since its parser is native code: a stream's event costs a fraction of what httpx takes for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from ringcore.errors import ConfigError, RingcoreError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Chunk", "HttpFailure", "OpenAIClient", "Usage"]

_DATA, _DONE = b"data:", b"[DONE]"
_MAX_SHOWN = 500  # of an error's body
_CONNECT_TIMEOUT_S = 30.0
_KEEP_ALIVE_S = 3.0  # less than services keep idle connections, which they may close under a request


class HttpFailure(RingcoreError):
    """A service did not answer as it should. kind: "http 429" and so on, "connection", "cut off", "error in stream",
    "no answer"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message, kind=kind)
        self.kind = kind


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole answer, of completions or chat."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        choice = self.choices[0] if self.choices else _NO_CHOICE
        delta = choice.delta or choice.message
        return choice.text if delta is None else delta.content or ""

    @property
    def reasoning(self) -> str:
        choice = self.choices[0] if self.choices else _NO_CHOICE
        delta = choice.delta or choice.message
        return "" if delta is None else delta.reasoning_content or delta.reasoning or ""

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason if self.choices else None


_NO_CHOICE = _Choice()


class _Models(msgspec.Struct, frozen=True):
    class Card(msgspec.Struct, frozen=True):
        id: str

    data: list[Card]


class OpenAIClient:
    """Connections to a service. url: with or without "/v1". Raises `ConfigError` for a bad one, and without aiohttp."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        check_aiohttp()
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r}: give http://HOST:PORT, or https", option="url", value=url)
        url = url.rstrip("/")
        self._base = url if url.endswith("/v1") else f"{url}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._chunks = msgspec.json.Decoder(Chunk)

    async def __aenter__(self) -> OpenAIClient:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def model_names(self) -> list[str]:
        async with self._opened("GET", "models", None) as response:
            return [card.id for card in msgspec.json.decode(await response.read(), type=_Models).data]

    async def ask(self, path: str, body: Mapping[str, Any]) -> Chunk:
        """A whole answer. path: "completions" or "chat/completions"."""
        async with self._opened("POST", path, body) as response:
            return self._chunk(await response.read())

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """The events of an answer, as they come. Leaving the iteration closes the connection."""
        async with self._opened("POST", path, {**body, "stream": True}) as response:
            rest = b""
            while data := await response.content.readany():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    event = event.removeprefix(_DATA).strip()
                    if event == _DONE:
                        return
                    if event:
                        yield self._chunk(event)
        raise HttpFailure("cut off", f"an answer ended without {_DONE.decode()}")

    def _chunk(self, data: bytes) -> Chunk:
        try:
            chunk = self._chunks.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpFailure("no answer", f"not OpenAI's form: {error}: {_shown(data)}") from error
        if chunk.error is not None:
            raise HttpFailure("error in stream", f"the answer broke off: {chunk.error}")
        return chunk

    def _opened(self, method: str, path: str, body: Mapping[str, Any] | None) -> _Response:
        assert self._session is not None, "enter the client first"
        data = None if body is None else msgspec.json.encode(body)
        return _Response(self._session.request(method, f"{self._base}/{path}", data=data))


class _Response:
    """A response of status 200; errors of aiohttp become `HttpFailure`."""

    def __init__(self, opening: Any) -> None:
        self._opening = opening

    async def __aenter__(self) -> aiohttp.ClientResponse:
        import aiohttp

        try:
            response: aiohttp.ClientResponse = await self._opening.__aenter__()
            if response.status != 200:
                shown = _shown(await response.read())
                await self._opening.__aexit__(None, None, None)
                raise HttpFailure(f"http {response.status}", f"status {response.status}: {shown}")
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from error
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import aiohttp

        await self._opening.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | OSError) and not isinstance(error, asyncio.CancelledError):
            raise _failure(error) from error


def check_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("url: needs aiohttp: pip install 'ringcore[bench]'", option="url", value=None) from error


def _failure(error: Exception) -> HttpFailure:
    import aiohttp

    if isinstance(error, TimeoutError):  # aiohttp's own, of connecting, is one
        return HttpFailure("timeout", f"no connection within {_CONNECT_TIMEOUT_S:.0f} s")
    kind = "cut off" if isinstance(error, aiohttp.ClientPayloadError) else "connection"
    return HttpFailure(kind, f"{type(error).__name__}: {error}")


def _shown(data: bytes) -> str:
    return data[:_MAX_SHOWN].decode(errors="replace")
