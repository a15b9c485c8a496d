"""Prometheus metrics: the engine's state at the time of the scrape, and statistics of the service's requests.

The names are vLLM's for the metrics that it has too, so that its dashboards work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringcore.errors import RingcoreError
from ringcore.front_end.async_engine import AsyncEngine
from ringcore.params.outputs import RequestMetrics, RequestOutput
from ringcore.protocol.requests import EngineStats

__all__ = ["RequestRecord", "ServiceMetrics"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_LONG_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 960.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

# name: (what it counts, buckets)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", _SECONDS),
    "inter_token_latency_seconds": ("From output to output of requests that are streamed.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean of a request, without its first token.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Arrival to last token.", _LONG_SECONDS),
    "request_queue_time_seconds": ("Arrival to first step.", _LONG_SECONDS),
    "request_prefill_time_seconds": ("First step to first token.", _LONG_SECONDS),
    "request_decode_time_seconds": ("First to last token.", _LONG_SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of all completions of a prompt.", _TOKENS),
    "request_params_n": ("Completions asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
}


class ServiceMetrics:
    """The metrics of one service, in a separate registry."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        self._histograms = {
            name: Histogram(f"vllm:{name}", doc, ["model_name"], registry=self._registry, buckets=buckets).labels(
                model_name
            )
            for name, (doc, buckets) in _HISTOGRAMS.items()
        }
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, of requests that got a token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success",
            "Completions that ended, by how they did.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.ended = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"vllm:{name}", doc, ["model_name"], registry=self._registry).labels(model_name=self._model_name)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class RequestRecord:
    """Records the metrics of one prompt, from its first output to its end."""

    def __init__(self, metrics: ServiceMetrics, n: int, *, is_streamed: bool) -> None:
        self._metrics, self._n, self._is_streamed = metrics, n, is_streamed
        self._num_tokens = 0
        self._ended: set[int] = set()  # completions
        self._last_output_s: float | None = None

    def record(self, output: RequestOutput) -> None:
        """Records a delta output (only what is new since the previous one)."""
        metrics, now = self._metrics, time.monotonic()
        if self._num_tokens == 0 and output.outputs:
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
        num_new = sum(len(completion.token_ids) for completion in output.outputs)
        self._num_tokens += num_new
        metrics.generation_tokens.inc(num_new)
        if self._is_streamed and num_new:
            if self._last_output_s is not None:
                metrics.observe("inter_token_latency_seconds", now - self._last_output_s)
            self._last_output_s = now
        for completion in output.outputs:
            if completion.finish_reason is not None and completion.index not in self._ended:
                self._ended.add(completion.index)
                metrics.ended[completion.finish_reason].inc()
        if output.finished and output.metrics is not None:
            self._observe_times(output.metrics, len(output.prompt_token_ids))

    def ended_early(self, reason: str) -> None:
        """Counts the unfinished completions as ended, by "abort" or "error"."""
        self._metrics.ended[reason].inc(self._n - len(self._ended))

    def _observe_times(self, times: RequestMetrics, num_prompt_tokens: int) -> None:
        observe = self._metrics.observe
        observe("request_prompt_tokens", num_prompt_tokens)
        observe("request_generation_tokens", self._num_tokens)
        observe("request_params_n", self._n)
        first_token_s, finished_s = times.first_token_s, times.finished_s
        if finished_s is None or first_token_s is None:
            return
        decode_s = finished_s - first_token_s
        observe("time_to_first_token_seconds", first_token_s - times.arrival_s)
        observe("e2e_request_latency_seconds", finished_s - times.arrival_s)
        observe("request_decode_time_seconds", decode_s)
        if times.first_scheduled_s is not None:
            observe("request_queue_time_seconds", times.first_scheduled_s - times.arrival_s)
            observe("request_prefill_time_seconds", first_token_s - times.first_scheduled_s)
        if self._num_tokens > self._n:
            observe("request_time_per_output_token_seconds", decode_s * self._n / (self._num_tokens - self._n))


class _EngineCollector(Collector):
    """Gauges and counters of the engine's last known state."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._labels = engine, {"model_name": model_name}

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield self._gauge("num_requests_running", "Requests that are computed.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a place.", stats.num_waiting)
        used = self._kv_cache_usage(stats)
        yield self._gauge("kv_cache_usage_perc", "The share of the KV cache that is in use, 1 for all.", used)
        yield self._counter("num_preemptions", "Requests that lost their place.", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit_tokens)
        waiting = "Prompts that wait for the tokenizer, or are being encoded."
        yield self._gauge("num_tokenizer_jobs", waiting, self._engine.num_tokenizer_jobs, "ringcore")
        refused = "Prompts refused because too many waited for the tokenizer."
        yield self._counter("num_tokenizer_refusals", refused, self._engine.num_tokenizer_refusals, "ringcore")
        sleeping = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state.", labels=[*self._labels, "sleep_state"]
        )
        for state, is_so in (("awake", not stats.is_sleeping), ("asleep", stats.is_sleeping)):
            sleeping.add_metric([*self._labels.values(), state], float(is_so))
        yield sleeping

    def _kv_cache_usage(self, stats: EngineStats) -> float:
        try:
            return 1 - stats.num_free_blocks / self._engine.ready.num_blocks
        except RingcoreError:  # the engine is restarting
            return 0.0

    def _gauge(self, name: str, doc: str, value: float, prefix: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{prefix}:{name}", doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, doc: str, value: float, prefix: str = "vllm") -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
