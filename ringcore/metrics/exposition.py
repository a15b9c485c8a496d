"""The metrics in Prometheus's form. The names are vLLM's where it has the metric too, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ringcore.metrics.histogram import HistogramCounts
from ringcore.metrics.request_log import HISTOGRAMS, RequestLog
from ringcore.metrics.step_log import StepMetrics
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.requests import EngineStats
from ringcore.protocol.stored_kv import StoredKVStats

__all__ = ["EngineSource", "make_registry"]


class EngineSource(Protocol):
    """What the metrics of an engine are read from. No method raises."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def ready(self) -> EngineReady | None:
        """None while the engine starts, and once it is dead."""
        ...

    @property
    def num_restarts(self) -> int:
        """Of the engine and of its workers."""
        ...

    @property
    def num_tokenizer_jobs(self) -> int: ...

    @property
    def num_tokenizer_refusals(self) -> int: ...

    def step_metrics(self) -> StepMetrics | None:
        """Asks the engine; None if it does not answer soon."""
        ...


def make_registry(source: EngineSource, log: RequestLog, model_name: str) -> CollectorRegistry:
    """A registry with all metrics of one engine, which it reads when it is scraped."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(source, log, model_name))
    return registry


class _EngineCollector(Collector):
    def __init__(self, source: EngineSource, log: RequestLog, model_name: str) -> None:
        self._source, self._log, self._labels = source, log, {"model_name": model_name}

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry that asks need not scrape the engine for it."""
        return []

    def collect(self) -> Iterable[Metric]:
        ready, stats = self._source.ready, self._source.stats
        yield from self._of_scheduler(stats, ready)
        yield from self._of_front_end()
        yield from self._of_requests()
        steps = self._source.step_metrics()
        if steps is not None:
            yield from self._of_steps(steps)
            if steps.stored_kv is not None:
                yield from self._of_store(steps.stored_kv)
        if ready is not None:
            yield from self._of_workers(ready)

    def _of_scheduler(self, stats: EngineStats, ready: EngineReady | None) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests that are computed.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place.", stats.num_waiting)
        used = 0.0 if ready is None else 1 - stats.num_free_blocks / ready.num_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "The share of the KV cache that is in use, 1 for all.", used)
        yield self._counter("vllm:num_preemptions", "Requests that lost their place.", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_query_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit_tokens)
        sleeping = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state.", labels=self._names("sleep_state"))
        for state, is_so in (("awake", not stats.is_sleeping), ("asleep", stats.is_sleeping)):
            sleeping.add_metric(self._values(state), float(is_so))
        yield sleeping
        yield self._counter("ringcore:num_steps", "Steps of the engine.", stats.step)
        restarts = "Restarts of the engine and of its workers."
        yield self._counter("ringcore:num_restarts", restarts, self._source.num_restarts)

    def _of_front_end(self) -> Iterable[Metric]:
        waiting = "Prompts that wait for the tokenizer, or are being encoded."
        yield self._gauge("ringcore:num_tokenizer_jobs", waiting, self._source.num_tokenizer_jobs)
        refused = "Prompts refused because too many waited for the tokenizer."
        yield self._counter("ringcore:num_tokenizer_refusals", refused, self._source.num_tokenizer_refusals)

    def _of_requests(self) -> Iterable[Metric]:
        totals = self._log.totals()
        for name, counts in totals.histograms.items():
            yield self._histogram(f"vllm:{name}", HISTOGRAMS[name][0], counts)
        prompts = "Tokens of prompts, of requests that got a token."
        yield self._counter("vllm:prompt_tokens", prompts, totals.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", totals.generation_tokens)
        ended = "Completions that ended, by how they did."
        success = CounterMetricFamily("vllm:request_success", ended, labels=self._names("finished_reason"))
        for reason, count in totals.ended.items():
            success.add_metric(self._values(reason), count)
        yield success

    def _of_steps(self, steps: StepMetrics) -> Iterable[Metric]:
        yield self._histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", steps.tokens)
        yield self._histogram("ringcore:step_seconds", "The time of a step.", steps.seconds)
        yield self._histogram("ringcore:step_requests", "Requests in a step.", steps.requests)

    def _of_store(self, stored: StoredKVStats) -> Iterable[Metric]:
        hits = "Prompt tokens found beyond the device; vllm:prefix_cache_hits has them too."
        yield self._counter("vllm:external_prefix_cache_hits", hits, stored.num_hit_tokens)
        yield self._gauge("ringcore:stored_kv_blocks", "Blocks kept beyond the device.", stored.num_blocks)
        failed = "Blocks that could not be loaded, and were computed again."
        yield self._counter("ringcore:stored_kv_failed_blocks", failed, stored.num_failed_blocks)
        yield self._counter("ringcore:stored_kv_saved_bytes", "Bytes copied out, all ranks.", stored.saved_bytes)
        yield self._counter("ringcore:stored_kv_loaded_bytes", "Bytes copied back, all ranks.", stored.loaded_bytes)
        yield self._counter("ringcore:stored_kv_load_seconds", "Seconds that loads took, summed.", stored.load_s)

    def _of_workers(self, ready: EngineReady) -> Iterable[Metric]:
        blocks = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's size.", labels=self._names("block_size", "num_gpu_blocks")
        )
        blocks.add_metric(self._values(str(ready.block_size), str(ready.num_blocks)), 1)
        yield blocks
        planned = GaugeMetricFamily(
            "ringcore:worker_memory_bytes",
            "Memory of a rank's device as planned at the start: weights, activations, KV cache and others.",
            labels=self._names("rank", "category"),
        )
        for rank, table in enumerate(ready.memory_bytes):
            for category, num_bytes in table.items():
                planned.add_metric(self._values(str(rank), category), num_bytes)
        yield planned
        resident = GaugeMetricFamily(
            "ringcore:process_resident_bytes",
            "Host memory of the engine's process and of each worker's.",
            labels=self._names("process"),
        )
        for name, num_bytes in _resident_bytes(ready.pids).items():
            resident.add_metric(self._values(name), num_bytes)
        yield resident

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=self._names())
        family.add_metric(self._values(), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=self._names())
        family.add_metric(self._values(), value)
        return family

    def _histogram(self, name: str, doc: str, counts: HistogramCounts) -> Metric:
        family = HistogramMetricFamily(name, doc, labels=self._names())
        cumulative, buckets = 0, []
        for bound, count in zip([*counts.bounds, float("inf")], counts.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(cumulative)))
        family.add_metric(self._values(), buckets, counts.sum)
        return family

    def _names(self, *more: str) -> list[str]:
        return [*self._labels, *more]

    def _values(self, *more: str) -> list[str]:
        return [*self._labels.values(), *more]


def _resident_bytes(pids: Mapping[str, int]) -> dict[str, int]:
    """Of the processes that are still there."""
    found = {}
    for name, pid in pids.items():
        try:
            found[name] = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return found
