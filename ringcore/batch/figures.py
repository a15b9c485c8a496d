"""What a run of a job has measured: rates, latencies, KV cache use over time; in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringcore.errors import RingcoreError
from ringcore.host.log_histogram import LogHistogram
from ringcore.params.outputs import RequestMetrics, RequestOutput

__all__ = ["EngineFigures", "Figures", "Finished", "RequestAbortedError", "Sample"]

_MAX_SAMPLES = 2048
_RATE_S = 30.0  # rates are of the last seconds
_QUANTILES = (0.5, 0.9, 0.99)


class RequestAbortedError(RingcoreError):
    """A request was ended from outside, as by an operator who put the engine to sleep."""


class EngineFigures(NamedTuple):
    """Sums over all engines, since they started."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # mean share in use
    num_hit_tokens: int
    num_queried_tokens: int


_NONE = EngineFigures(0, 0, 0.0, 0, 0)


class Finished(NamedTuple):
    """A request that was answered. times: on its host's clock."""

    prompt_tokens: int
    output_tokens: int
    times: RequestMetrics | None


class Sample(NamedTuple):
    time_s: float  # since the run began
    num_tokens: int  # of finished requests until then
    kv_cache_usage: float


@dataclass(slots=True)
class Figures:
    """Of this run: what earlier runs of the job have done is not in it."""

    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    engines: EngineFigures = _NONE
    samples: list[Sample] = field(default_factory=list)
    _interval_s: float = 0.0  # between samples; doubled when there are too many
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, requests, output tokens
    _latencies: dict[str, LogHistogram] = field(
        default_factory=lambda: {name: LogHistogram() for name in ("ttft_s", "e2e_s", "queue_s")}
    )
    _waiting: dict[str, list[float]] = field(default_factory=lambda: {"ttft_s": [], "e2e_s": [], "queue_s": []})

    def record(self, output: RequestOutput) -> None:
        """The final output of a prompt. Raises `RequestAbortedError`: what was cut off is no result."""
        if any(one.finish_reason == "abort" for one in output.outputs):
            raise RequestAbortedError("the request was ended from outside before it had finished")
        if output.error is None:
            num_tokens = sum(len(one.token_ids) for one in output.outputs)
            self.add(Finished(len(output.prompt_token_ids), num_tokens, output.metrics))

    def add(self, request: Finished) -> None:
        self.num_requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        if request.times is not None:
            self._add_times(request.times)

    def _add_times(self, times: RequestMetrics) -> None:
        if times.first_token_s is None or times.finished_s is None:
            return
        waiting = self._waiting
        waiting["ttft_s"].append(times.first_token_s - times.arrival_s)
        waiting["e2e_s"].append(times.finished_s - times.arrival_s)
        if times.first_scheduled_s is not None:
            waiting["queue_s"].append(times.first_scheduled_s - times.arrival_s)

    def sample(self, engines: EngineFigures) -> None:
        """At each turn of the clock."""
        now = time.monotonic()
        self.engines = engines
        self._recent.append((now, self.num_requests, self.output_tokens))
        while now - self._recent[0][0] > _RATE_S and len(self._recent) > 2:
            self._recent.popleft()
        elapsed_s = now - self.started_s
        if not self.samples or elapsed_s - self.samples[-1].time_s >= self._interval_s:
            self.samples.append(Sample(elapsed_s, self.output_tokens, engines.kv_cache_usage))
        if len(self.samples) > _MAX_SAMPLES:
            self._interval_s = max(2 * self._interval_s, 2 * elapsed_s / _MAX_SAMPLES)
            self.samples = self.samples[::2]
        for name, values in self._waiting.items():
            self._latencies[name].add(np.array(values))
            values.clear()

    def restart_clock(self) -> None:
        """The engines are ready: the time until now does not count."""
        self.started_s = time.monotonic()
        self._recent.append((self.started_s, 0, 0))

    def stop_clock(self) -> None:
        """The last request has ended: the time from now on does not count."""
        self.ended_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return (self.ended_s or time.monotonic()) - self.started_s

    def rates(self) -> tuple[float, float]:
        """(requests, output tokens) a second, of the last seconds."""
        if len(self._recent) < 2:
            return 0.0, 0.0
        (first_s, requests, tokens), (last_s, last_requests, last_tokens) = self._recent[0], self._recent[-1]
        seconds = max(last_s - first_s, 1e-9)
        return (last_requests - requests) / seconds, (last_tokens - tokens) / seconds

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache."""
        return self.engines.num_hit_tokens / max(1, self.engines.num_queried_tokens)

    def percentiles(self) -> dict[str, dict[str, float]]:
        """By name of the latency; empty for one without values."""
        return {
            name: {f"p{100 * q:.0f}": histogram.quantile(q) for q in _QUANTILES}
            for name, histogram in self._latencies.items()
            if histogram.total
        }

    def as_json(self) -> dict[str, Any]:
        requests_per_s, tokens_per_s = self.rates()
        return {
            "elapsed_s": round(self.elapsed_s, 3),
            "requests_per_s": round(requests_per_s, 3),
            "output_tokens_per_s": round(tokens_per_s, 3),
            "num_running": self.engines.num_running,
            "num_waiting": self.engines.num_waiting,
            "kv_cache_usage": round(self.engines.kv_cache_usage, 4),
            "cache_hit_rate": round(self.cache_hit_rate, 4),
        }
