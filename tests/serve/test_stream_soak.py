"""Three hundred streams, half of them left by their clients: memory stays flat. The long form takes ten minutes and
measures the slope."""

from __future__ import annotations

import asyncio
import random
import time
from statistics import linear_regression

import httpx
import psutil
import pytest
from fake_engine import make_model_folder
from running_service import DEADLINE_S, eventually, http
from test_serve_command import Command

NUM_STREAMS = 300
SHORT_S, LONG_S = 4.0, 600.0
SAMPLE_S = 1.0
MAX_SLOPE = 0.25  # MB a minute, of all processes together; a request that left 100 bytes behind would be at 0.5


class Soak:
    def __init__(self, url: str, pids: list[int], duration_s: float) -> None:
        self.url = url
        self.processes = [psutil.Process(pid) for pid in pids]
        self.until = time.monotonic() + duration_s
        self.num_read = self.num_left = 0
        self.samples: list[tuple[float, float]] = []  # (seconds, MB of private memory)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    async def stream(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while not self.is_over:
            body = {
                "prompt": [97 + number % 26],
                "max_tokens": rng.randrange(1, 60),
                "stream": True,
                "ignore_eos": True,
            }
            leaves_after = rng.choice([None, rng.randrange(1, 20)])
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                num_lines = 0
                async for line in answer.aiter_lines():
                    num_lines += line.startswith("data")
                    if leaves_after is not None and num_lines >= leaves_after:
                        self.num_left += 1
                        break
                else:
                    assert line == "" or line == "data: [DONE]"
                    self.num_read += 1

    async def sample(self) -> None:
        started = time.monotonic()
        while not self.is_over:
            used = sum(process.memory_full_info().uss for process in self.processes)
            self.samples.append((time.monotonic() - started, used / 1e6))
            await asyncio.sleep(SAMPLE_S)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, limits=limits) as client:
            await asyncio.gather(self.sample(), *(self.stream(client, number) for number in range(NUM_STREAMS)))

    def slope(self) -> float:
        """MB a minute, over the second half, when caches are filled."""
        later = self.samples[len(self.samples) // 2 :]
        return linear_regression(*zip(*later, strict=True)).slope * 60


@pytest.mark.timeout(LONG_S + 240)
def test_streams_that_come_and_go_leave_memory_flat(tmp_path, is_long):
    flags = ["--no-access-log", "--max-num-seqs", str(NUM_STREAMS)]
    with Command(make_model_folder(tmp_path), *flags) as command:
        pids = [command.process.pid, *(child.pid for child in command.children)]
        soak = Soak(command.url, pids, LONG_S if is_long else SHORT_S)
        asyncio.run(soak.run())
        print(f"{soak.num_read} read, {soak.num_left} left, {soak.samples[-1][1]:.1f} MB")
        assert min(soak.num_read, soak.num_left) > 10
        eventually(lambda: http.get(f"{command.url}/health").json()["num_running"] == 0, "the engine is idle")
        eventually(lambda: psutil.Process(command.process.pid).num_fds() < 100, "connections are closed")
        if is_long:
            print(f"slope {soak.slope():.3f} MB a minute")
            assert soak.slope() < MAX_SLOPE
