"""The client of `ringcore bench`, on a server that costs next to nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts
from ringcore.bench.figures import Figures
from ringcore.bench.load import Record, play
from ringcore.bench.prompts import BenchRequest
from ringcore.bench.targets import HttpTarget
from ringcore.http_client import OpenAIClient

__all__ = ["BenchClient"]


class BenchClient:
    def commands(self) -> dict[str, Any]:
        return {"load": self.load, "stream": self.stream}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return facts(("ringcore", "aiohttp"))

    def stream(self, num_streams: int, num_events: int, interval_s: float) -> list[Row]:
        """All streams at once. interval_s: between the events of each; 0 for as fast as the client takes them."""
        command = [sys.executable, "-m", "benchmarks.peers.stream_server"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            port = int(server.stdout.readline())
            used_s, began_s = time.process_time(), time.perf_counter()
            records = asyncio.run(_stream(port, num_streams, num_events, interval_s))
            used_s, took_s = time.process_time() - used_s, time.perf_counter() - began_s
            server.stdin.close()
        figures = Figures(records)
        assert not figures.failures, figures.failures[0]
        num = sum(len(answer.text_s) for _, answer in figures.answers)
        assert num == num_streams * num_events, "an event is missing"
        gaps = figures.latencies_ms()["itl"]
        rows: list[Row] = [
            ("events", "events/s", num / took_s),
            ("of the client's CPU", "µs an event", used_s * 1e6 / num),
        ]
        if interval_s:
            late = np.percentile(gaps, 99) - 1e3 * interval_s
            rows += [("ITL, p50", "ms", float(np.median(gaps))), ("ITL, p99, beyond the interval", "ms", float(late))]
        return rows


async def _stream(port: int, num_streams: int, num_events: int, interval_s: float) -> list[Record]:
    async with OpenAIClient(f"http://127.0.0.1:{port}") as client:
        target = HttpTarget(client, "made", fields={"interval_s": interval_s} if interval_s else {})
        return await play(target, [BenchRequest("a", num_events)] * num_streams, [0.0] * num_streams)


if __name__ == "__main__":
    serve(BenchClient().commands())
