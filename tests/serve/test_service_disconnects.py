"""A client that leaves takes its request with it; whatever happens, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket

import httpx
import pytest
from fake_engine import SLOW, make_model_folder
from running_service import DEADLINE_S, eventually, http, served, text_of

ENDLESS = [97, SLOW]  # 126 tokens, 50 ms each


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model"))) as running:
        http.post(f"{running.url}/v1/completions", json={"prompt": "ab"}).raise_for_status()
        eventually(running.is_idle, "the first request ended")
        yield running


def raw_request(service, **fields) -> socket.socket:
    """A connection on which a request has been sent, and nothing read."""
    body = json.dumps({"prompt": ENDLESS, "max_tokens": 120} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S)
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"prompt": [ENDLESS] * 3, "stream": True}])
def test_a_client_that_leaves_frees_its_blocks(service, fields):
    num_tasks = service.num_tasks()
    connection = raw_request(service, **fields)
    eventually(lambda: service.engine.stats.num_running > 0, "the request runs")
    assert not service.is_idle()
    step = service.engine.stats.step
    connection.close()
    eventually(service.is_idle, "its blocks are free")
    assert service.engine.stats.step - step < 100  # of 120: some were in flight, and the machine may be busy
    eventually(lambda: service.num_tasks() <= num_tasks, "its tasks have ended")


def test_a_client_that_leaves_before_its_first_token(service):
    """While the request waits for the engine, behind a step of somebody else's."""
    first = raw_request(service, stream=True)
    eventually(lambda: service.engine.stats.num_running > 0, "the request runs")
    raw_request(service, stream=True).close()
    raw_request(service).close()
    first.close()
    eventually(service.is_idle, "all blocks are free")


def test_a_client_that_leaves_while_it_sends(service):
    num_tasks = service.num_tasks()
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    eventually(lambda: service.num_tasks() > num_tasks, "its task has begun")
    connection.close()
    eventually(lambda: service.num_tasks() <= num_tasks, "its task has ended")


def test_a_client_that_reads_nothing_holds_up_nobody(service):
    slow = raw_request(service, prompt="slow reader", stream=True)
    fast = http.post(f"{service.url}/v1/completions", json={"prompt": "ab", "max_tokens": 20}, timeout=DEADLINE_S)
    assert fast.json()["choices"][0]["text"] == text_of("ab", 20)
    received = b""
    while b"[DONE]" not in received:
        received += slow.recv(1 << 16)
    slow.close()
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == text_of("slow reader", 117)


def test_200_streams_with_random_disconnects_leave_nothing(service):
    rng = random.Random(11)
    num_tasks, num_fds = service.num_tasks(), len(os.listdir("/proc/self/fd"))
    fates = [rng.choice(["whole", "stream", "leave", "leave", "leave at once"]) for _ in range(200)]

    async def one(client: httpx.AsyncClient, number: int, fate: str) -> None:
        prompt = f"prompt {number}"
        endless = {"prompt": ENDLESS, "max_tokens": 120}
        body = {"prompt": prompt, "max_tokens": 30, "stream": fate != "whole", "n": 1 + number % 2}
        if fate == "whole":
            answer = await client.post("/v1/completions", json=body)
            assert {choice["text"] for choice in answer.json()["choices"]} == {text_of(prompt, 30)}
            return
        if fate == "leave at once":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.02):
                    await client.post("/v1/completions", json=endless)
            return
        texts, num_events, leaves_after = ["", ""], 0, rng.randrange(1, 20)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    num_events += 1
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["text"]
                    if fate == "leave" and num_events == leaves_after:
                        return
        assert texts[: body["n"]] == [text_of(prompt, 30)] * body["n"]

    async def main() -> None:
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        async with httpx.AsyncClient(base_url=service.url, limits=limits, timeout=DEADLINE_S * 2) as client:
            await asyncio.gather(*(one(client, number, fate) for number, fate in enumerate(fates)))

    asyncio.run(main())
    eventually(service.is_idle, "all requests have ended")
    eventually(lambda: service.num_tasks() <= num_tasks, "all tasks have ended")
    gc.collect()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_fds, "all descriptors are closed")
