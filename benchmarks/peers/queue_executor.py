"""Calls through ringcore's whole `MultiprocExecutor`, to workers that do nothing: what the queue's users see."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.queue_loops import LOOK, WORK, Caller, Row, look, percentiles, run
from ringcore.config import EngineConfig
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.worker import rpc

FACTORY = "benchmarks.peers.queue_executor:EchoWorker"
LONG_CALL_S, NUM_READ_ONLY = 5.0, 100
METHODS = {LOOK: "look", WORK: "nap"}


class EchoWorker:
    """A worker without a device."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None: ...

    @rpc(scope="engine")
    def init_device(self) -> None: ...

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        return {}

    @rpc
    def look(self, payload: object) -> object:
        return look(payload)

    @rpc
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @rpc(read_only=True)
    def ping(self) -> None: ...

    def shutdown(self) -> None: ...


class ExecutorCaller(Caller):
    packages: ClassVar[tuple[str, ...]] = ()
    _executor: MultiprocExecutor

    def start(self) -> None:
        options = {"large_messages": self._settings["transport"], "call_ring_bytes": self._settings["call_ring_bytes"]}
        config = make_config(self._settings["readers"], **options)
        self._executor = MultiprocExecutor(config, worker_factory=FACTORY)
        self._executor.start()

    def ask(self, op: int, argument: Any) -> list[Any]:
        return list(self._executor.collective_rpc(METHODS[op], (argument,)))

    def more(self) -> list[Row]:
        """A call that changes nothing, over and over while all workers are busy with another."""
        count, long_call_s = max(2, int(NUM_READ_ONLY * self._scale)), LONG_CALL_S * self._scale
        long_call = self._executor.submit_rpc("nap", (long_call_s,))
        took_ms: list[float] = []
        while len(took_ms) < count and not (took_ms and long_call.done()):
            began_s = time.perf_counter()
            self._executor.collective_rpc("ping")
            took_ms.append((time.perf_counter() - began_s) * 1e3)
            time.sleep(0.8 * long_call_s / count)
        long_call.result()
        return percentiles("read-only call during a long one", "ms", took_ms)

    def pids(self) -> list[int]:
        return list(self._executor.pids().values())

    def close(self) -> None:
        if hasattr(self, "_executor"):
            self._executor.shutdown()


def make_config(num_workers: int, **options: Any) -> EngineConfig:
    """The configuration of an engine with the smallest model that can be spread over the workers."""
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    model = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "rms_norm_eps": 1e-5}
    model |= dict.fromkeys(sizes, 8 * num_workers) | {"num_hidden_layers": 1, "max_position_embeddings": 64}
    model |= {"num_attention_heads": num_workers, "num_key_value_heads": num_workers}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        return EngineConfig.from_options(model=folder, load_format="dummy", tensor_parallel_size=num_workers, **options)


if __name__ == "__main__":
    run(ExecutorCaller())
