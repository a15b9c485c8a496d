"""The result of a simulation: latencies, throughput, cache hit rate, utilisation; as values and as a text table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ringcore.testing.replica import Records, ReplicaTotals
from ringcore.testing.trace import Trace

__all__ = ["Latency", "SimulationResult", "summarize"]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds; NaN without samples."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


NOT_MEASURED = Latency(math.nan, math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """ttft: from a request's arrival to its first token. itl: between consecutive tokens of a request; quantiles are
    exact to 0.5% (`LogHistogram`). e2e: from arrival to end. Throughputs are over `duration_s`, from the first arrival
    to the last end.
    """

    num_requests: int
    num_finished: int
    refused: dict[str, int]  # by reason
    refusals: dict[str, str]  # by reason, the message of the first
    num_cut: int  # ended with fewer tokens than requested, at max_model_len or with the whole cache full
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Latency
    itl: Latency
    e2e: Latency
    cache_hit_rate: float  # prefix cache hits over all prompt tokens looked up
    num_preemptions: int
    utilisation: list[float]  # by replica: the fraction of the duration in which it computed
    requests_by_replica: list[int]
    num_steps: int
    num_advances: int  # calls of the engines
    records: Records
    trace: Trace

    @property
    def ttft_s(self) -> np.ndarray:
        """[num_requests] float64: NaN for those that were refused."""
        ttft: np.ndarray = self.records.first_token_s - self.trace.time_s
        return ttft

    @property
    def e2e_s(self) -> np.ndarray:
        """[num_requests] float64: NaN for those that were refused."""
        e2e: np.ndarray = self.records.finish_s - self.trace.time_s
        return e2e

    def to_dict(self) -> dict[str, Any]:
        """The summary as builtin values, without per-request records. NaN becomes None."""
        summary = {name: getattr(self, name) for name in self.__slots__ if name not in ("records", "trace")}
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))
        return plain

    def table(self) -> list[tuple[str, str]]:
        """(name, value) lines of a text table."""
        refused = [(f"  refused: {reason}", f"{count}") for reason, count in sorted(self.refused.items())]
        cut = [("  cut short", f"{self.num_cut}")] if self.num_cut else []
        busy = np.array(self.utilisation)
        return [
            ("requests", f"{self.num_requests}"),
            ("  finished", f"{self.num_finished}"),
            *cut,
            *refused,
            ("duration", f"{self.duration_s:.1f} s"),
            ("throughput", f"{self.requests_per_s:.2f} requests/s"),
            ("  prompt tokens", f"{self.prompt_tokens_per_s:.0f} tokens/s"),
            ("  output tokens", f"{self.output_tokens_per_s:.0f} tokens/s"),
            *(
                (name, _latency_text(latency))
                for name, latency in (("TTFT", self.ttft), ("ITL", self.itl), ("end to end", self.e2e))
            ),
            ("prefix cache hits", f"{100 * self.cache_hit_rate:.1f}% of prompt tokens"),
            ("preemptions", f"{self.num_preemptions}"),
            ("utilisation", f"min {busy.min():.1%}  median {np.median(busy):.1%}  max {busy.max():.1%}"),
        ]


def _latency_text(latency: Latency) -> str:
    values = {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99, "max": latency.max}
    return "  ".join(f"{name} {_seconds_text(value)}" for name, value in values.items())


def _seconds_text(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def summarize(trace: Trace, records: Records, totals: Sequence[ReplicaTotals]) -> SimulationResult:
    finished = ~np.isnan(records.finish_s)
    num_finished = int(finished.sum())
    end_s = float(records.finish_s[finished].max()) if num_finished else float(trace.time_s[-1])
    duration_s = end_s - float(trace.time_s[0])
    per_s = 1 / duration_s if duration_s else 0.0
    num_queries = sum(total.num_prefix_query_tokens for total in totals)
    num_hits = sum(total.num_prefix_hit_tokens for total in totals)
    return SimulationResult(
        num_requests=len(trace),
        num_finished=num_finished,
        refused=dict(records.refused),
        refusals=dict(records.refusals),
        num_cut=int((records.num_tokens[finished] < trace.output_tokens[finished]).sum()),
        duration_s=duration_s,
        requests_per_s=num_finished * per_s,
        prompt_tokens_per_s=int(trace.prompt_tokens[finished].sum()) * per_s,
        output_tokens_per_s=int(records.num_tokens.sum()) * per_s,
        ttft=_latency(records.first_token_s - trace.time_s),
        itl=_itl(records),
        e2e=_latency(records.finish_s - trace.time_s),
        cache_hit_rate=num_hits / num_queries if num_queries else 0.0,
        num_preemptions=sum(total.num_preemptions for total in totals),
        utilisation=[total.busy_s * per_s for total in totals],
        requests_by_replica=[total.num_requests for total in totals],
        num_steps=sum(total.num_steps for total in totals),
        num_advances=sum(total.num_advances for total in totals),
        records=records,
        trace=trace,
    )


def _latency(seconds: np.ndarray) -> Latency:
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return NOT_MEASURED
    p50, p90, p99 = (float(value) for value in np.quantile(known, list(QUANTILES.values())))
    return Latency(float(known.mean()), p50, p90, p99, float(known.max()))


def _itl(records: Records) -> Latency:
    itl = records.itl
    if not itl.total:
        return NOT_MEASURED
    p50, p90, p99 = (itl.quantile(q) for q in QUANTILES.values())
    return Latency(itl.mean(), p50, p90, p99, itl.quantile(1.0))
