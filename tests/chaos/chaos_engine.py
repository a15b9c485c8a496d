"""An engine to be hurt: the real front end, engine and executor, over workers without a device."""

from __future__ import annotations

import ctypes
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import FakeWorker, expected

from ringcore import EngineConfig, SamplingParams
from ringcore.errors import RingcoreError
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.front_end.client import EngineCoreClient
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.worker import rpc

RING_BYTES = 64 << 10  # so that a message of LARGE_BYTES goes beside the ring
LARGE_BYTES = 100_000
WAIT_S = 90.0


class ChaosWorker(FakeWorker):
    """The fake worker, with methods that do what goes wrong in a real one."""

    def __init__(self, config, rank: int) -> None:
        super().__init__(config, rank)
        self._kept: list[Any] = []
        self._hang_in_step = ""

    # Here as well, so that a scenario finds them on this class.

    @rpc(scope="engine")
    def init_device(self) -> None:
        super().init_device()

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        return super().load_model()

    @rpc(scope="engine")
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return super().get_kv_cache_spec()

    @rpc(scope="engine")
    def determine_available_memory(self) -> dict[str, int]:
        return super().determine_available_memory()

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        how, self._hang_in_step = self._hang_in_step, ""
        if how:
            hang(how)
        return super().execute_model(scheduler_output)

    @rpc(scope="engine")
    def shutdown(self) -> None:
        pass

    @rpc(read_only=True)
    def stats(self) -> dict:
        return {"rank": self.rank, "num_steps": self._num_steps}

    @rpc(read_only=True)
    def health(self) -> dict:
        return {"rank": self.rank, "device": "cpu"}

    @rpc
    def echo(self, value: object = None, times: int = 1) -> object:
        return [self.rank, value]

    @rpc
    def hang_in_next_step(self, how: str, on_rank: int) -> None:
        """In the next step this rank hangs, and the others wait for it, as they would in a collective."""
        self._hang_in_step = how if self.rank == on_rank else "collective"

    @rpc
    def keep(self, value: object) -> int:
        """Holds on to an argument, as a method that was given an array might."""
        self._kept.append(value)
        return len(self._kept)

    @rpc
    def kept(self) -> list:
        return self._kept

    @rpc
    def hang_the_engine(self) -> None:
        """`HangingMultiproc` hangs at it, before any worker hears of it."""

    @rpc
    def roll(self, nonce: int, dice: list[dict]) -> list:
        """What a random call does on this rank: returns, raises, or takes its time."""
        mine = dice[self.rank]
        if mine["sleep_s"]:
            time.sleep(mine["sleep_s"])
        match mine["act"]:
            case "raise":
                raise KeyError(f"{nonce} on {self.rank}")
            case "unencodable":
                return [lambda: None]
            case "large":
                return [nonce, self.rank, np.full(LARGE_BYTES // 8, nonce, np.int64)]
        return [nonce, self.rank, os.getpid()]


def hang(how: str) -> None:
    """Never returns, in the way of `how`."""
    match how:
        case "python":
            while True:
                time.sleep(0.01)
        case "gil":
            re.match("(a+)+$", "a" * 64 + "b")  # in C, for ever, without letting go of the interpreter's lock
        case "c call":
            while True:  # a signal, of whoever asks for the stacks, ends one sleep
                ctypes.CDLL(None).sleep(10_000)
        case "collective":  # waits for a rank that does not come: a file that nobody makes
            while not os.path.exists("/no/such/rendezvous"):
                time.sleep(0.002)
        case _:
            raise ValueError(how)


def create_worker(config, rank: int, rendezvous: str | None) -> ChaosWorker:
    return ChaosWorker(config, rank)


class ChaosMultiproc(MultiprocExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="chaos_engine:create_worker")


class HangingMultiproc(ChaosMultiproc):
    """In the engine's own thread it may hang."""

    def forward(self, call):
        if call.method == "hang_the_engine":
            hang("python")
        return super().forward(call)


def create_gated_worker(config, rank: int, rendezvous: str | None) -> ChaosWorker:
    """Rank 1 tells the pids of the engine and its own in a file, and goes on when there is another."""
    if rank == 1:
        folder = Path(config.model.model)
        (folder / "new").write_text(f"{os.getppid()} {os.getpid()}")
        (folder / "new").rename(folder / "pids")
        while not (folder / "open").exists():
            time.sleep(0.01)
    return ChaosWorker(config, rank)


class GatedMultiproc(MultiprocExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="chaos_engine:create_gated_worker")


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
