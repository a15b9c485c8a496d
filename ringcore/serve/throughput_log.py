"""What a service's log says of its engines: their memory at the start, and their throughput while they work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from ringcore.front_end.serving_engine import ServingEngine

__all__ = ["Throughput", "throughput_logged"]

_PERIOD_S = 10.0

_log = logging.getLogger(__name__)


class Throughput:
    """The engine's work between two calls of `line`."""

    def __init__(self, engine: ServingEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._last = clock(), engine.totals(), engine.stats

    def line(self) -> str | None:
        """Since the last call; None if nothing was computed and nothing waits. It may take some milliseconds."""
        before, totals_before, stats_before = self._last
        self._last = now, totals, stats = self._clock(), self._engine.totals(), self._engine.stats
        prompt_tokens = max(0, totals.prompt_tokens - totals_before.prompt_tokens)
        generated = max(0, totals.generation_tokens - totals_before.generation_tokens)
        if not (prompt_tokens or generated or stats.num_running or stats.num_waiting):
            return None
        seconds = max(now - before, 1e-9)
        parts = [
            f"prompts {prompt_tokens / seconds:,.1f} tokens/s",
            f"generation {generated / seconds:,.1f} tokens/s",
            f"{stats.num_running} running",
            f"{stats.num_waiting} waiting",
        ]
        if totals.num_blocks:
            parts.append(f"KV cache {1 - stats.num_free_blocks / totals.num_blocks:.1%} used")
        if (asked := stats.num_prefix_query_tokens - stats_before.num_prefix_query_tokens) > 0:
            hits = stats.num_prefix_hit_tokens - stats_before.num_prefix_hit_tokens
            parts.append(f"{hits / asked:.1%} of prompts from the prefix cache")
        return ", ".join(parts)


@asynccontextmanager
async def throughput_logged(engine: ServingEngine, period_s: float = _PERIOD_S) -> AsyncIterator[None]:
    """Logs what the started engine has, and every `period_s` seconds what it did, unless it was idle."""
    ready = engine.ready
    _log.info(
        "ready after %.1f s: a KV cache of %d blocks of %d tokens, %.1f requests of max_model_len=%d at once",
        sum(seconds for phase, seconds in ready.phase_seconds.items() if "." not in phase),
        ready.num_blocks,
        ready.block_size,
        ready.max_concurrency,
        ready.max_model_len,
    )
    logging_task = asyncio.create_task(_log_throughput(engine, period_s))
    try:
        yield
    finally:
        logging_task.cancel()
        with suppress(asyncio.CancelledError):
            await logging_task


async def _log_throughput(engine: ServingEngine, period_s: float) -> None:
    throughput = Throughput(engine)
    while True:
        await asyncio.sleep(period_s)
        line = await asyncio.to_thread(throughput.line)
        if line is not None:
            _log.info("%s", line)
