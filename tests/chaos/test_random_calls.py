"""Thousands of calls that fail, dawdle and overtake each other at random: each gets its own answer, or error."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import deque

import pytest
from chaos_engine import WAIT_S, TokenReader, make_config
from chaos_worker import LARGE_BYTES, ChaosMultiproc
from process_stat import is_alive
from process_table import wait_until

from ringcore.errors import RingcoreError, RpcTimeoutError, WorkerDiedError, WorkerError
from ringcore.executor import calls
from ringcore.front_end.client import EngineCoreClient

NUM_CALLS = 3_000
NUM_RANKS = 2
IN_FLIGHT = 12


class Dice:
    """A random call and what it may come to."""

    def __init__(self, rng: random.Random, nonce: int) -> None:
        self.nonce = nonce
        self.ranks = [
            {
                "act": rng.choices(["ok", "raise", "unencodable", "large"], [90, 6, 2, 2])[0],
                "sleep_s": 0.03 if rng.random() < 0.004 else 0.0,
            }
            for _ in range(NUM_RANKS)
        ]
        self.timeout = rng.choice([0.001, 0.01]) if rng.random() < 0.2 else None
        if self.timeout is not None and rng.random() < 0.08:  # whatever the machine, some are too late
            for dice in self.ranks:
                dice["sleep_s"] = 0.03
        self.reply_rank = rng.randrange(NUM_RANKS) if rng.random() < 0.1 else None
        self.future = None
        self.is_told_whole = True

    def submit(self, executor) -> None:
        self.future = executor.submit_rpc("roll", [self.nonce, self.ranks], None, self.timeout, self.reply_rank)

    @property
    def bad_ranks(self) -> set[int]:
        return {rank for rank, dice in enumerate(self.ranks) if dice["act"] in ("raise", "unencodable")}

    @property
    def owed(self) -> list[int]:
        return list(range(NUM_RANKS)) if self.reply_rank is None else [self.reply_rank]

    def check(self) -> str:
        """What it came to, in a word. Raises if that belongs to another call, or cannot be."""
        try:
            value = self.future.result(WAIT_S)
        except RpcTimeoutError as error:
            self._check_timeout(error)
            return "timeout"
        except WorkerError as error:
            self._check_failure(error)
            return "error"
        # A rank that raises but owes no value is reported where its error comes before the value.
        assert not self.bad_ranks & set(self.owed), f"{self.ranks} returned {value}"
        values = value if self.reply_rank is None else [value]
        for rank, answer in zip(self.owed, values, strict=True):
            self._check_value(rank, answer)
        return "value"

    def _check_timeout(self, error: RpcTimeoutError) -> None:
        assert self.timeout is not None, error
        assert error.details["timeout_s"] == self.timeout
        assert set(error.details["missing_ranks"]) <= set(range(NUM_RANKS))

    def _check_failure(self, error: WorkerError) -> None:
        failures = error.failures or {error.details["rank"]: error}
        assert set(failures) <= self.bad_ranks, f"{sorted(failures)} failed, of {self.bad_ranks}"
        # Others are waited for, but neither past the call's deadline nor long.
        self.is_told_whole = set(failures) == self.bad_ranks or self.timeout is not None
        for rank, failure in failures.items():
            assert failure.details["rank"] == rank
            if self.ranks[rank]["act"] == "raise":
                assert failure.details["error_type"] == "KeyError"
                assert f"{self.nonce} on {rank}" in failure.details["error_message"]

    def _check_value(self, rank: int, answer: list) -> None:
        assert answer[:2] == [self.nonce, rank], f"call {self.nonce} got {answer[:2]} of rank {rank}"
        if self.ranks[rank]["act"] == "large":
            assert answer[2].shape == (LARGE_BYTES // 8,)
            assert (answer[2] == self.nonce).all()


@pytest.mark.timeout(600)
def test_every_answer_is_of_its_call(model_folder, is_long, seed, monkeypatch):
    monkeypatch.setattr(calls, "ERROR_GRACE_S", WAIT_S)  # a busy machine's other rank may take longer than usual
    rng = random.Random(seed)
    executor = ChaosMultiproc(make_config(model_folder))
    executor.start()
    counts: dict[str, int] = {}
    under_way: deque[Dice] = deque()
    num_cut = 0  # errors that came without those of all ranks that failed
    try:
        for nonce in range(NUM_CALLS * (20 if is_long else 1)):
            under_way.append(Dice(rng, nonce))
            under_way[-1].submit(executor)
            while len(under_way) > rng.randrange(IN_FLIGHT):
                under_way.rotate(rng.randrange(IN_FLIGHT))
                dice = under_way.popleft()
                what = dice.check()
                counts[what] = counts.get(what, 0) + 1
                num_cut += not dice.is_told_whole and dice.reply_rank is None
        for dice in under_way:
            dice.check()
        assert executor.collective_rpc("echo", ["last"], timeout=WAIT_S) == [[0, "last"], [1, "last"]]
        assert wait_until(lambda: executor.check() is None and executor.num_late_replies > 0, WAIT_S)
    finally:
        executor.shutdown()
    assert min(counts[what] for what in ("value", "error", "timeout")) > 10, counts
    assert num_cut < counts["error"] / 20
    print(f"\n{counts}, {executor.num_late_replies} late replies")


def state_and_restarts(client: EngineCoreClient) -> tuple[str, int]:
    health = client.health()
    return health.state, health.num_restarts


@pytest.mark.timeout(600)
def test_calls_and_tokens_with_workers_dying(model_folder, is_long, seed):
    """Kills at random moments: tokens as if nothing had been, calls with a value or an error of their own."""
    rng = random.Random(seed)
    num_kills = 100 if is_long else 3
    stopped, wrong, ends = threading.Event(), [], {"value": 0, "died": 0, "error": 0}
    with EngineCoreClient(make_config(model_folder, max_worker_restarts=num_kills)) as client:
        client.wait_ready()
        first_pids = client.ready.pids

        def call() -> None:
            nonce = 0
            while not stopped.is_set():
                nonce += 1
                act = ("ok", "raise")[nonce % 10 == 0]
                try:
                    values = client.collective_rpc("roll", [nonce, [{"act": act, "sleep_s": 0.0}] * 2], timeout=WAIT_S)
                    ends["value"] += 1
                    if [value[:2] for value in values] != [[nonce, 0], [nonce, 1]]:
                        wrong.append(values)
                except WorkerDiedError:
                    ends["died"] += 1
                except WorkerError as error:
                    ends["error"] += 1
                    if f"{nonce} on 0" not in error.details["error_message"]:
                        wrong.append(error)
                except RingcoreError as error:
                    wrong.append(error)
                    return

        caller = threading.Thread(target=call)
        caller.start()
        try:
            tokens = TokenReader(client, "t", rng)
            for number in range(num_kills):
                tokens.add(rng.randint(1, 12))
                for _ in range(rng.randrange(6)):
                    tokens.take(WAIT_S)
                os.kill(client.ready.pids[f"worker {rng.randrange(2)}"], signal.SIGKILL)
                tokens.finish()
                wanted = ("ready", number + 1)
                assert wait_until(lambda: state_and_restarts(client) == wanted, WAIT_S), client.health()  # noqa: B023
        finally:
            stopped.set()
            caller.join(WAIT_S)
        assert not caller.is_alive()
        assert client.collective_rpc("echo", ["last"], timeout=WAIT_S) == [[0, "last"], [1, "last"]]
        last_pids = client.ready.pids
        assert last_pids["engine"] == first_pids["engine"]
        assert not set(first_pids.values()) & set(last_pids.values()) - {first_pids["engine"]}
    assert wrong == []
    assert ends["value"] > num_kills
    assert wait_until(lambda: not any(map(is_alive, [*first_pids.values(), *last_pids.values()])), WAIT_S)
    print(f"\n{num_kills} kills, {tokens.num_tokens} tokens, {ends}")
