"""Everything at once, for as long as is wanted: tokens, calls, faults, and nothing that grows."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import pytest
from chaos_engine import WAIT_S, TokenReader, WrongAnswer, make_config
from process_stat import is_alive
from process_table import num_descriptors, status_kb, wait_until

from ringcore.errors import RpcTimeoutError, WorkerDiedError, WorkerError
from ringcore.front_end.client import EngineCoreClient

SHORT_S, LONG_S = 4.0, 1800.0
NUM_THREADS = 8
GROWTH_KB = 16 << 10
SILENCE_S = 90.0
WANTED = {"requests", "echo", "large echo", "stats", "WorkerError", "kills"}
PATIENCE_S = 90.0  # with a busy machine, on which some of it comes late


class Soak:
    def __init__(self, client: EngineCoreClient, seed: int, duration_s: float) -> None:
        self.client, self.seed = client, seed
        self.until = time.monotonic() + duration_s
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []
        self.last_seen = [time.monotonic()] * NUM_THREADS
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        patience_s = 0.0 if self.counts.keys() >= WANTED else PATIENCE_S
        return time.monotonic() > self.until + patience_s or bool(self.wrong)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def run_thread(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        try:
            if number == 0:
                self._generate(rng, number)
            else:
                self._call(rng, number)
        except BaseException as error:
            self.wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    def _generate(self, rng: random.Random, number: int) -> None:
        reader = TokenReader(self.client, "soak", rng)
        while not self.is_over:
            reader.add(rng.randint(1, 16))
            if rng.random() < 0.02:
                # What the aborted had so far is checked by nobody; unknown ids must do no harm.
                self.client.abort(["nobody", "soak-1"])
            while not reader.is_done:
                reader.take(WAIT_S)
                self.last_seen[number] = time.monotonic()
            self.count("requests")

    def _call(self, rng: random.Random, number: int) -> None:
        while not self.is_over:
            try:
                self.count(self._one_call(rng))
            except (RpcTimeoutError, WorkerDiedError, WorkerError) as error:
                self.count(type(error).__name__)
            self.last_seen[number] = time.monotonic()
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.02)

    def _one_call(self, rng: random.Random) -> str:
        client = self.client
        match rng.choice(["echo", "echo", "large", "stats", "fail", "timeout", "engine", "health", "one rank"]):
            case "echo":
                value = rng.randbytes(rng.randint(0, 5000))
                _expect(client.collective_rpc("echo", [value], timeout=WAIT_S), [[0, value], [1, value]])
                return "echo"
            case "large":
                value = rng.randbytes(rng.randint(50_000, 400_000))
                _expect(client.collective_rpc("echo", [value], timeout=WAIT_S), [[0, value], [1, value]])
                return "large echo"
            case "stats":
                _expect([stats["rank"] for stats in client.collective_rpc("stats", timeout=WAIT_S)], [0, 1])
                return "stats"
            case "fail":
                client.collective_rpc("fail", timeout=WAIT_S)
                raise WrongAnswer("fail() did not")
            case "timeout":
                client.collective_rpc("nap", [0.01], timeout=0.005)
                return "nap in time"
            case "engine":
                client.call_engine("stats", timeout=WAIT_S)
                return "engine stats"
            case "health":
                if client.health(timeout=WAIT_S).state == "dead":
                    raise WrongAnswer("health() says dead")
                return "health"
            case _:
                rank = rng.randrange(2)
                _expect(client.collective_rpc("echo", [1], timeout=WAIT_S, unique_reply_rank=rank), [rank, 1])
                return "one rank"


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise WrongAnswer(f"{str(found)[:200]}, not {str(wanted)[:200]}")


def held_by(pids: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Descriptors and kB of each process."""
    return {name: (num_descriptors(pid), status_kb("RssAnon", pid)) for name, pid in pids.items()}


@pytest.mark.timeout(2400)
def test_soak(model_folder, fresh_tmp, is_long, seed):
    duration_s = LONG_S if is_long else SHORT_S
    with EngineCoreClient(make_config(model_folder, max_worker_restarts=1_000_000)) as client:
        client.wait_ready()
        soak = Soak(client, seed, duration_s)
        threads = [threading.Thread(target=soak.run_thread, args=(number,)) for number in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        growth = Growth(client)
        killer = random.Random(seed)
        next_kill, before = time.monotonic() + duration_s / 3, -2  # batches that were done at the last kill
        while not soak.is_over:
            time.sleep(0.2)
            assert time.monotonic() - min(soak.last_seen) < SILENCE_S, f"a thread is silent: {soak.last_seen}"
            # A request that is there at two deaths is held for the cause of both, and ends. There at the last one may
            # be a batch that was not counted yet, or the next one, which was added before the engine knew of it.
            are_others = soak.counts.get("requests", 0) > before + 1
            if time.monotonic() > next_kill and are_others and client.health().state == "ready":
                growth.look()
                os.kill(client.ready.pids[f"worker {killer.randrange(2)}"], signal.SIGKILL)
                before = soak.counts.get("requests", 0)
                soak.count("kills")
                next_kill = time.monotonic() + min(20.0, duration_s / 3)
        for thread in threads:
            thread.join(WAIT_S)
        assert soak.wrong == []
        assert not any(thread.is_alive() for thread in threads)
        growth.look()
        pids = client.ready.pids
    assert wait_until(lambda: not any(map(is_alive, pids.values())), WAIT_S)
    assert list(fresh_tmp.iterdir()) == []
    assert soak.counts.keys() >= WANTED, soak.counts
    print(f"\n{duration_s:.0f} s: {soak.counts}")


class Growth:
    """What the processes that live through it hold, against a first look once everything has been used."""

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client
        self._first: dict[str, tuple[int, int]] | None = None

    def look(self) -> None:
        gc.collect()
        held = held_by({"engine": self._client.ready.pids["engine"], "front end": os.getpid()})
        if self._first is None:
            self._first = held
            return
        for name, (descriptors, kb) in held.items():
            first_descriptors, first_kb = self._first[name]
            assert descriptors <= first_descriptors + 8, (
                f"{name}: {descriptors} descriptors, {first_descriptors} at first"
            )
            assert kb < first_kb + GROWTH_KB, f"{name}: {kb} kB, {first_kb} at first"
