"""An engine to be hurt: the real front end, engine and executor, over the workers of `chaos_worker`."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from chaos_worker import LARGE_BYTES, ChaosMultiproc
from fake_engine import expected

from ringcore import EngineConfig, SamplingParams
from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.protocol.requests import EngineCoreRequest

RING_BYTES = 64 << 10  # so that a message of LARGE_BYTES goes beside the ring
WAIT_S = 90.0


def make_config(folder: str, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(
        model=folder,
        load_format="dummy",
        **{
            "executor": ChaosMultiproc,
            "max_model_len": 128,
            "block_size": 8,
            "tensor_parallel_size": 2,
            "call_ring_bytes": RING_BYTES,
            "reply_ring_bytes": RING_BYTES,
            **options,
        },
    )


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), arrival_s=time.monotonic())


class WrongAnswer(AssertionError):
    """The engine answered, with something else than it should have."""


def check(condition: bool, what: object) -> None:
    if not condition:
        raise WrongAnswer(what)


class TokenReader:
    """Generates with one client and checks every token: none is lost, repeated, or of another request."""

    def __init__(self, client: EngineCoreClient, name: str, rng: random.Random) -> None:
        self._client, self._name, self._rng = client, name, rng
        self._num_requests = 0
        self._open: dict[str, list[int]] = {}  # what is yet to come, by request
        self.num_tokens = 0

    def add(self, num_requests: int = 4, extra_tokens: tuple[int, ...] = ()) -> None:
        requests = []
        for _ in range(num_requests):
            request_id = f"{self._name}{self._num_requests}"
            self._num_requests += 1
            prompt = [self._rng.randrange(250) for _ in range(self._rng.randint(1, 40))] + list(extra_tokens)
            requests.append(make_request(request_id, prompt, num_tokens := self._rng.randint(1, 24)))
            self._open[request_id] = expected(prompt, num_tokens)
        self._client.add_requests(requests)

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self, timeout: float | None = None) -> None:
        for output in self._client.get_outputs(timeout).outputs:
            if output.request_id not in self._open:
                continue
            check(output.error is None, output)
            left, new = self._open[output.request_id], output.new_token_ids
            check(left[: len(new)] == new, f"{output.request_id}: {new}, expected {left}")
            del left[: len(new)]
            self.num_tokens += len(new)
            if output.finish_reason:
                check(not left, f"{output.request_id}: {output.finish_reason} with {left} to come")
                del self._open[output.request_id]

    def finish(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.is_done:
            check(time.monotonic() < deadline, f"no end of {sorted(self._open)}")
            self.take(1.0)


def check_serves(client: EngineCoreClient) -> None:
    """Raises unless the engine generates and answers calls, small and large ones, on every rank."""
    client.wait_ready()
    tokens = TokenReader(client, "check", random.Random(1))
    tokens.add()
    tokens.finish()
    large = os.urandom(LARGE_BYTES)
    answers = client.collective_rpc("echo", [large], timeout=WAIT_S)
    check(answers == [[rank, large] for rank in range(len(answers))], "the large echo")


def describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON has it."""
    details = error.details if isinstance(error, RingcoreError) else {}
    return {
        "type": type(error).__name__,
        "is_ours": isinstance(error, RingcoreError),
        "message": str(error)[:2000],
        "details": {name: details.get(name) for name in ("process", "rank", "exit_code", "signal", "last_log")},
    }


def idle() -> None:
    """Called by a front end whose engine has nothing to do."""
