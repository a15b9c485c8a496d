"""ringcore's AsyncEngine, read by many tasks of this process; and what tokenizer and kernel take for themselves."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts, forget_garbage
from ringcore import AsyncEngine, SamplingParams

__all__ = ["FrontEndChild", "measure_alone"]

WRITES = 500
_EVENT = {  # of a service's stream, as long as most
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "model",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
}


class FrontEndChild:
    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engine: AsyncEngine | None = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self.load, "pid": os.getpid, "stream": self.stream, "alone": measure_alone}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self._engine = AsyncEngine(model, **settings["engine"])
        self._runner.run(self._start())
        return facts(("ringcore", "tokenizers", "msgspec", "numpy"), construct_s=time.perf_counter() - began_s)

    async def _start(self) -> None:
        assert self._engine is not None
        await self._engine.start()

    def stream(self, loads: Sequence[Mapping[str, Any]], limit_s: float) -> dict[str, Any]:
        """All requests at once, each read to its end by a task of its own."""
        forget_garbage()
        return self._runner.run(self._stream(loads, limit_s))

    async def _stream(self, loads: Sequence[Mapping[str, Any]], limit_s: float) -> dict[str, Any]:
        began_s = time.perf_counter()
        async with asyncio.timeout(limit_s):
            counts = await asyncio.gather(*[self._read(load["prompt"], load["max_tokens"]) for load in loads])
        seconds, num_tokens = time.perf_counter() - began_s, sum(tokens for tokens, _ in counts)
        return {
            "rows": [("output", "tokens/s", num_tokens / seconds)],
            "completion_tokens": num_tokens,
            "num_events": sum(outputs for _, outputs in counts),
        }

    async def _read(self, prompt: str, max_tokens: int) -> tuple[int, int]:
        assert self._engine is not None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind="delta")
        num_tokens = num_outputs = 0
        async for output in self._engine.generate(prompt, params):
            num_tokens += len(output.outputs[0].token_ids)
            num_outputs += 1
        return num_tokens, num_outputs

    def close(self) -> None:
        if self._engine is not None:
            self._runner.run(self._engine.close())
        self._runner.close()


def measure_alone(model: str, token_ids: list[int]) -> dict[str, float]:
    """Microseconds of CPU: encoding a text by token, decoding by token, writing one event; and an event's bytes."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    text = tokenizer.decode(token_ids)
    encode_us = _cpu_us(lambda: tokenizer.encode(text, add_special_tokens=False)) / len(token_ids)

    def decode() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            stream.step(tokenizer, token_id)

    event = b"data: " + msgspec.json.encode(_EVENT) + b"\n\n"
    chunk = f"{len(event):x}\r\n".encode() + event + b"\r\n"
    return {
        "encode_us": encode_us,
        "decode_us": _cpu_us(decode) / len(token_ids),
        "write_us": _write_us(chunk),
        "event_bytes": len(chunk),
    }


def _cpu_us(action: Callable[[], object], repeats: int = 5) -> float:
    """Of this thread; the median of a few runs."""
    taken = []
    for _ in range(repeats):
        began_s = time.thread_time()
        action()
        taken.append(time.thread_time() - began_s)
    return 1e6 * median(taken)


def _write_us(chunk: bytes) -> float:
    """Of one write to a TCP connection within this machine, the reading left out."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as reader,
        server.accept()[0] as writer,
    ):
        writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken = []
        for _ in range(WRITES):
            taken.append(_cpu_us(lambda: writer.send(chunk), repeats=1))
            left = len(chunk)
            while left:
                left -= len(reader.recv(left))
        return median(taken)


def split_processes(front_end: int) -> tuple[list[int], list[int]]:
    """(the process of a front end with its tokenizers, its engine's process)."""
    of_front_end, engines = [front_end], []
    for child in psutil.Process(front_end).children():
        (engines if child.name() == "ringcore engine" else of_front_end).append(child.pid)
    return of_front_end, engines


if __name__ == "__main__":
    child = FrontEndChild()
    try:
        serve(child.commands())
    finally:
        child.close()
