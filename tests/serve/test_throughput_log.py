"""The lines of a service's log about its engines' work."""

from __future__ import annotations

import asyncio
import logging

from ringcore.front_end.engine_metrics import ServingTotals
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.requests import EngineStats
from ringcore.serve.throughput_log import Throughput, throughput_logged

READY = EngineReady(100, 16, 1600, 128, 12.5, {"load_model": 2.0, "load_model.weights": 1.5, "plan": 0.5}, [], {}, 512)


class Engine:
    """Its figures, as a test sets them."""

    def __init__(self) -> None:
        self.counts = ServingTotals(0, 0, 100)
        self.stats = EngineStats(0, 0, 0, 100, 0, 0, 0)
        self.ready = READY

    def totals(self) -> ServingTotals:
        return self.counts


def test_what_was_done_since_the_last_line():
    engine, now = Engine(), 5.0
    throughput = Throughput(engine, lambda: now)
    now = 15.0
    assert throughput.line() is None
    engine.counts = ServingTotals(3000, 20, 100)
    engine.stats = EngineStats(9, 2, 1, 25, 0, 30, 120)
    now = 25.0
    assert throughput.line() == (
        "prompts 300.0 tokens/s, generation 2.0 tokens/s, 2 running, 1 waiting, KV cache 75.0% used, "
        "25.0% of prompts from the prefix cache"
    )
    now = 30.0  # nothing came of it in these seconds, and it is not idle
    assert throughput.line() == (
        "prompts 0.0 tokens/s, generation 0.0 tokens/s, 2 running, 1 waiting, KV cache 75.0% used"
    )
    engine.stats = EngineStats(9, 0, 0, 100, 0, 30, 120)
    assert throughput.line() is None


def test_the_log_of_a_service(caplog):
    caplog.set_level(logging.INFO, "ringcore")
    engine = Engine()

    async def serve() -> None:
        async with throughput_logged(engine, period_s=0.001):
            await asyncio.sleep(0.02)
            assert len(caplog.records) == 1  # of its start; then it is idle
            engine.counts = ServingTotals(30, 7, 100)
            async with asyncio.timeout(60):
                while len(caplog.records) == 1:
                    await asyncio.sleep(0.001)

    asyncio.run(serve())
    first, second = [one.getMessage() for one in caplog.records]
    assert (
        first == "ready after 2.5 s: a KV cache of 100 blocks of 16 tokens, 12.5 requests of max_model_len=128 at once"
    )
    assert second.startswith("prompts ")
