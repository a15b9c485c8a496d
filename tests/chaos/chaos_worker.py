"""Workers and executors of an engine to be hurt, without a device and without the front end, whose imports would be a
fifth of what a process of it costs.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import FakeWorker

from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.worker import rpc

LARGE_BYTES = 100_000


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
        super().__init__(config, worker_factory="chaos_worker:create_worker")


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
        super().__init__(config, worker_factory="chaos_worker:create_gated_worker")
