"""`ringcore.testing.Simulator` on a trace that it makes, as a user's script calls it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts
from ringcore.config import EngineConfig
from ringcore.testing import Simulator, poisson_trace

PACKAGES = ("ringcore", "msgspec", "numpy")


class RingcoreSimulator:
    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._config = EngineConfig.from_options(model=model, load_format="dummy")
        return facts(PACKAGES)

    def simulate(
        self, routing: str, num_replicas: int, num_requests: int, requests_per_s: float, trace: Mapping[str, int]
    ) -> list[Row]:
        arrivals = poisson_trace(num_requests, requests_per_s, **trace)
        began_s = time.perf_counter()
        result = Simulator(self._config, num_replicas, routing=routing).run(arrivals)
        seconds = time.perf_counter() - began_s
        if result.num_finished != num_requests:
            raise RuntimeError(f"{result.num_finished} of {num_requests} requests finished: {result.refusals}")
        return [
            ("replayed", "requests/s", num_requests / seconds),
            ("engines' steps", "steps/s", result.num_steps / seconds),
        ]


if __name__ == "__main__":
    simulator = RingcoreSimulator()
    serve({"load": simulator.load, "simulate": simulator.simulate})
