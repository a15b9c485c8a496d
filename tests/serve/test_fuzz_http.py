"""Wrong requests over HTTP: no 5xx, no hang, every neighbour served. The long form takes five minutes a test."""

from __future__ import annotations

import asyncio
import os
import random
import time

import httpx
import pytest
from fake_engine import make_model_folder
from http_fuzzing import wrong_body, wrong_bytes
from running_service import eventually, served, text_of

SHORT_S, LONG_S = 3.0, 300.0
NUM_CLIENTS = 8
MIN_NEIGHBOUR = 4  # requests that are served while others are wrong
ANSWER_S = 60.0  # of what takes milliseconds, on a machine that may be busy with anything
KEY = "key"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    with served(folder, api_keys=(KEY,), body_timeout_s=15.0) as running:
        yield running


class Fuzz:
    """Clients that send what is wrong, and one that sends what is right."""

    def __init__(self, service, seed: int, duration_s: float) -> None:
        self.service, self.seed = service, seed
        self.until = time.monotonic() + duration_s
        self.statuses: dict[int, int] = {}
        self.num_neighbour = 0
        self.slowest_s = 0.0

    @property
    def is_over(self) -> bool:
        """After the duration, and on a busy machine after the neighbour's requests that the test asks for."""
        return time.monotonic() > self.until and self.num_neighbour >= MIN_NEIGHBOUR

    def count(self, status: int, sent: object) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status < 500, (status, sent)

    async def neighbour(self) -> None:
        """A connection for each request: an idle one may be closed just as its client, starved of CPU time, uses it."""
        body = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
        while not self.is_over:
            started = time.monotonic()
            async with httpx.AsyncClient(base_url=self.service.url, timeout=ANSWER_S) as client:
                answer = await client.post("/v1/completions", json=body, headers=HEADERS)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text_of("ab", 3)
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            self.num_neighbour += 1
            await asyncio.sleep(0.01)

    async def bodies(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while not self.is_over:
            path, body = wrong_body(rng)
            answer = await client.post(path, content=body, headers=HEADERS)
            self.count(answer.status_code, (path, body[:2000], answer.text[:500]))
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"], (path, body[:2000])

    async def raw(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while not self.is_over:
            pieces = wrong_bytes(rng, KEY)
            reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(rng.choice([0, 0, 0.001]))
                if rng.random() < 0.5:
                    writer.write_eof()
                    line = await reader.readline()
                    if line.startswith(b"HTTP/1.1 "):
                        self.count(int(line.split()[1]), pieces)
                    await reader.read()
            except OSError:  # the service has closed it
                pass
            finally:
                writer.close()

    async def run(self, *, is_raw: bool) -> None:
        async with httpx.AsyncClient(base_url=self.service.url, timeout=ANSWER_S) as client:
            wrong = [self.raw(n) if is_raw else self.bodies(client, n) for n in range(NUM_CLIENTS)]
            async with asyncio.timeout(self.until - time.monotonic() + ANSWER_S):
                await asyncio.gather(self.neighbour(), *wrong)


@pytest.mark.parametrize("is_raw", [False, True], ids=["bodies", "bytes"])
def test_nothing_a_client_sends_stops_the_others(service, is_long, is_raw):
    seed = int.from_bytes(os.urandom(4), "little") if is_long else 20_261
    print(f"seed {seed}")
    fuzz = Fuzz(service, seed, LONG_S if is_long else SHORT_S)
    asyncio.run(fuzz.run(is_raw=is_raw))
    print(f"answers by status {fuzz.statuses}; the neighbour: {fuzz.num_neighbour}, slowest {fuzz.slowest_s:.3f} s")
    assert fuzz.num_neighbour >= MIN_NEIGHBOUR
    assert len(fuzz.statuses) > 1
    eventually(service.is_idle, "every request has left the engine")
