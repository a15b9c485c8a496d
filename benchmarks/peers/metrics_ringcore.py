"""An engine without a model, once with its metrics and once without, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks.peers.null_loops import Load
from benchmarks.peers.null_ringcore import RingcoreEngine, engine_config
from benchmarks.peers.protocol import serve
from benchmarks.peers.queue_loops import cpu_s
from benchmarks.peers.rows import Row, facts, forget_garbage
from ringcore.engine_core.admin.step_times import BATCH, StepTimes
from ringcore.engine_core.step_observer import StepRecord
from ringcore.metrics import RequestLog
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import NO_STATS, OutputColumns, StartedRequest

__all__ = ["MetricsChild"]


class MetricsChild:
    def __init__(self) -> None:
        self._model = ""
        self._number = 0

    def commands(self) -> dict[str, Any]:
        return {"load": self.load, "compare": self.compare, "observers": self.observers}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._model = model
        return facts(("ringcore", "msgspec", "numpy"))

    def compare(self, num_requests: int, num_tokens: int, num_pairs: int) -> list[Row]:
        """Medians over pairs of turns, each of `num_tokens` steps."""
        load = Load(num_requests, has_process=True)
        config = engine_config(self._model, load)
        log = RequestLog()
        engines = {"off": RingcoreEngine(config, True), "on": RingcoreEngine(config, True, observers=[log])}
        try:
            engines["on"].client.call_engine("step_metrics")
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for pair in range(num_pairs + 1):
                for name in ("off", "on") if pair % 2 else ("on", "off"):
                    took = self._turn(engines[name], num_requests, num_tokens)
                    if pair:
                        taken[name].append(took)
            assert log.totals().generation_tokens == (num_pairs + 1) * num_requests * num_tokens
            assert engines["on"].client.call_engine("step_metrics")["seconds"]["sum"] > 0
        finally:
            for engine in engines.values():
                engine.close()
        return _rows(taken)

    def observers(self, num_requests: int) -> list[Row]:
        """What the observers take of a step, called with steps and messages as they are: CPU time, the least of ten."""
        rows = int_array(range(num_requests))
        started = [StartedRequest(row, f"request-{row}", 0, 0.0, 0) for row in range(num_requests)]
        message = OutputColumns([], rows, rows, None, [], NO_STATS)
        at_client = RequestLog()
        at_client.received(OutputColumns(started, rows, rows, None, [], NO_STATS))
        client_us = _least_us(lambda: at_client.received(message)) - _least_us(lambda: None)
        off, on = StepTimes(), StepTimes()
        on.metrics()
        engine_us = _least_us(_batch(on, num_requests), 20) / BATCH - _least_us(_batch(off, num_requests), 20) / BATCH
        return [("at the client", "µs a step", client_us), ("in the engine", "µs a step", engine_us)]

    def _turn(self, engine: RingcoreEngine, num_requests: int, num_tokens: int) -> tuple[float, float]:
        """Microseconds a step: of wall time, and of CPU time of the client and the engine together."""
        prompts = []
        for _ in range(num_requests):
            self._number += 1
            prompts.append([self._number // 1000 % 1000, self._number % 1000, *range(14)])
        forget_garbage()
        pid, missing = engine.client.ready.pids["engine"], num_requests * num_tokens
        used_s, began_s = time.process_time() + cpu_s(pid), time.perf_counter()
        engine.add(prompts, num_tokens)
        while missing > 0:
            missing -= engine.get()
        wall_s = time.perf_counter() - began_s
        used_s = time.process_time() + cpu_s(pid) - used_s
        return wall_s * 1e6 / num_tokens, used_s * 1e6 / num_tokens


def _batch(times: StepTimes, num_requests: int) -> Callable[[], None]:
    """A batch of steps of an engine."""
    now_s = time.monotonic()
    step: StepRecord = (0, now_s, now_s, now_s, now_s, now_s, 0, num_requests, 0, num_requests, num_requests, 1)

    def record() -> None:
        for _ in range(BATCH):
            times.record(step)
        times.end_batch()

    return record


def _rows(taken: Mapping[str, list[tuple[float, float]]]) -> list[Row]:
    rows: list[Row] = []
    for i, kind in enumerate(("wall", "CPU")):
        off, on = [[turn[i] for turn in taken[name]] for name in ("off", "on")]
        rows += [
            (f"a step without metrics, {kind}", "µs", median(off)),
            (f"a step with metrics, {kind}", "µs", median(on)),
            (f"metrics add, {kind}", "%", 100 * (median(on) / median(off) - 1)),
        ]
    return rows


def _least_us(call: Callable[[], None], num: int = 5000) -> float:
    took = []
    for _ in range(10):
        began_s = time.process_time()
        for _ in range(num):
            call()
        took.append((time.process_time() - began_s) * 1e6 / num)
    return min(took)


if __name__ == "__main__":
    serve(MetricsChild().commands())
