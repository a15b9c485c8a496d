"""The Prometheus metrics of the engines of this process, on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ringcore.config import EngineConfig
from ringcore.config.options import CacheConfig
from ringcore.errors import ConfigError, RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.engine_generations import EngineGenerations
from ringcore.front_end.observers import FrontEndObserver
from ringcore.metrics import RequestLog, StepMetrics
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.requests import NO_STATS, EngineStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ringcore.front_end.tokenization.pool import TokenizerPool
    from ringcore.metrics.server import MetricsServer

__all__ = ["EngineMetrics", "ServingTotals", "make_registry_of", "serve_metrics", "totals_of"]

_STEPS_TIMEOUT_S = 1.0


class EngineMetrics:
    """Observes an engine from the first `log` on. It holds no reference to the engine's owner.

    config: of the engine. client: its client; None once it is gone. stats: of the engine. num_engine_restarts: of
    `AsyncEngine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        observers: list[FrontEndObserver],
        client: Callable[[], EngineCoreClient | None],
        stats: Callable[[], EngineStats] | None = None,
        num_engine_restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self.cache_config = {name: str(value) for name, value in _cache_options(config.cache).items()}
        self._observers, self._client = observers, client
        self._stats, self._num_engine_restarts = stats, num_engine_restarts
        self._log: RequestLog | None = None

    @classmethod
    def of_generations(cls, generations: EngineGenerations) -> EngineMetrics:
        return cls(
            generations.config,
            generations.observers,
            lambda: generations.current.client,
            lambda: generations.stats,
            lambda: generations.num_restarts,
        )

    def log(self) -> RequestLog:
        """Of the requests since the first call."""
        if self._log is None:
            self._log = RequestLog()
            self._observers.append(self._log)
        return self._log

    # `metrics.exposition.EngineSource`.

    @property
    def stats(self) -> EngineStats:
        if self._stats is not None:
            return self._stats()
        client = self._client()
        return NO_STATS if client is None else client.stats

    @property
    def ready(self) -> EngineReady | None:
        client = self._client()
        return None if client is None else client.last_ready

    @property
    def num_restarts(self) -> int:
        client = self._client()
        return self._num_engine_restarts() + (0 if client is None else client.num_worker_restarts)

    def step_metrics(self) -> StepMetrics | None:
        client = self._client()
        if client is None or client.last_ready is None:
            return None
        try:
            return msgspec.convert(client.call_engine("step_metrics", timeout=_STEPS_TIMEOUT_S), StepMetrics)
        except RingcoreError:  # dead, or silent: its other metrics are known without it
            return None


def _cache_options(options: CacheConfig) -> dict[str, object]:
    """Under vLLM's names."""
    return {
        "cache_dtype": "auto",  # the model's
        "enable_prefix_caching": options.enable_prefix_caching,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "num_gpu_blocks_override": options.num_blocks_override,
    }


class ServingTotals(NamedTuple):
    """Tokens since the first call, and the blocks of all KV caches."""

    prompt_tokens: int
    generation_tokens: int
    num_blocks: int


def totals_of(engines: Sequence[EngineMetrics]) -> ServingTotals:
    counts = [engine.log().totals() for engine in engines]
    return ServingTotals(
        sum(one.prompt_tokens for one in counts),
        sum(one.generation_tokens for one in counts),
        sum(ready.num_blocks for engine in engines if (ready := engine.ready) is not None),
    )


def make_registry_of(engines: Sequence[EngineMetrics], pool: TokenizerPool, model_name: str) -> CollectorRegistry:
    """A new registry; its counts begin with the first one. Raises `ConfigError` without prometheus_client."""
    try:
        from ringcore.metrics.exposition import ObservedEngine, make_registry
    except ImportError as error:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed; pip install 'ringcore[metrics]'",
            option="metrics",
        ) from error
    return make_registry([ObservedEngine(one, one.log()) for one in engines], pool, model_name)


def serve_metrics(registry: CollectorRegistry, port: int, host: str) -> MetricsServer:
    from ringcore.metrics.server import MetricsServer

    return MetricsServer(registry, port, host)
