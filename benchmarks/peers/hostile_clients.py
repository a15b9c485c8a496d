"""An honest client that asks short questions, and hostile ones beside it, in a process of their own."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from benchmarks.peers.http_streams import HttpError, complete, read_answer
from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts, forget_garbage

__all__ = ["ATTACKS", "HostileClients"]

NEW_TOKENS = 8
PAUSE_S = 0.2  # of the honest client, between an answer and the next question
LONG_CHARS = 3_900_000  # below the largest body that a service takes
NUM_LONG = 8  # hostile clients, each with one request under way
NUM_HEADS = 1100
HEAD_START_S = 1.0  # of the hostile clients

Attack = Callable[[int, str], Coroutine[Any, Any, None]]


def _long_body(model: str, field: str) -> bytes:
    text = "ab1!" * (LONG_CHARS // 4)
    prompt: Any = text if field == "prompt" else [{"role": "user", "content": text}]
    return json.dumps({"model": model, field: prompt, **({} if field == "prompt" else {"max_tokens": 1})}).encode()


async def _post_again_and_again(port: int, path: str, body: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
                writer.write(body)
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def _long_chats(port: int, model: str) -> None:
    body = _long_body(model, "messages")
    await asyncio.gather(*(_post_again_and_again(port, "/v1/chat/completions", body) for _ in range(NUM_LONG)))


async def _long_texts(port: int, model: str) -> None:
    body = _long_body(model, "prompt")
    await asyncio.gather(*(_post_again_and_again(port, "/tokenize", body) for _ in range(NUM_LONG)))


async def _half_sent_heads(port: int, model: str) -> None:
    async def hold() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
                    await reader.read()
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.2)

    await asyncio.gather(*(hold() for _ in range(NUM_HEADS)))


async def _nobody(port: int, model: str) -> None:
    return None


ATTACKS: dict[str, Attack] = {
    "alone": _nobody,
    "beside long conversations": _long_chats,
    "beside long texts to tokenize": _long_texts,
    "beside half-sent heads": _half_sent_heads,
}


class HostileClients:
    def commands(self) -> dict[str, Any]:
        return {"load": self.load, "beside": self.beside}

    def load(self, model: str, settings: dict[str, Any]) -> Any:
        """There is nothing to load; the model is the service's."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return facts(())

    def beside(self, target: dict[str, Any], attack: str, num: int, limit_s: float) -> list[Row]:
        """Milliseconds from the question to the first text; limit_s where there was none by then, or an error."""
        forget_garbage()
        return asyncio.run(_beside(target["port"], target["model"], ATTACKS[attack], num, limit_s))


async def _beside(port: int, model: str, attack: Attack, num: int, limit_s: float) -> list[Row]:
    hostile = asyncio.create_task(attack(port, model))
    await asyncio.sleep(HEAD_START_S)
    try:
        first_ms = [1e3 * await _ask(port, model, number, limit_s) for number in range(num)]
    finally:
        hostile.cancel()
        with suppress(asyncio.CancelledError):
            await hostile
    ordered = sorted(first_ms)
    return [
        ("time to first token, median", "ms", ordered[len(ordered) // 2]),
        ("time to first token, worst", "ms", ordered[-1]),
    ]


async def _ask(port: int, model: str, number: int, limit_s: float) -> float:
    messages = [{"role": "user", "content": f"{number}: what is the capital of France?"}]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            answer = read_answer(await complete(port, "/v1/chat/completions", body))
    except (HttpError, OSError, TimeoutError):
        await asyncio.sleep(PAUSE_S)
        return limit_s
    await asyncio.sleep(PAUSE_S)
    return answer.text_s[0] - began_s


if __name__ == "__main__":
    serve(HostileClients().commands())
