"""The figures of a load, under the names that the field has for them (those of `vllm bench`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ringcore.bench.load import Answer, Failure, Record
from ringcore.errors import InvalidRequestError

__all__ = ["SLO_METRICS", "Figures", "batch_latencies", "batch_table", "read_slos"]

# Milliseconds: to the first token, per token after it, between pieces of the stream, to the end.
SLO_METRICS = ("ttft", "tpot", "e2el")
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
_MEANINGS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_FROM_SENT = "_from_sent"


def read_slos(texts: Sequence[str]) -> dict[str, float]:
    """The limits of the goodput: "ttft:200" is at most 200 ms. Raises `InvalidRequestError`."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in SLO_METRICS or not limits[name] > 0:
            raise InvalidRequestError(
                f"goodput={text!r}: give {', '.join(SLO_METRICS)}, a colon and milliseconds, as in ttft:200",
                field="goodput",
                value=text,
            )
    return limits


@dataclass(frozen=True)
class Figures:
    """records: in the order in which the requests were due. percentiles: of the latencies, from 0 to 100."""

    records: Sequence[Record]
    percentiles: Sequence[float] = (90.0, 95.0, 99.0)
    slos: Mapping[str, float] | None = None

    @property
    def answers(self) -> list[tuple[Record, Answer]]:
        return [(record, record.outcome) for record in self.records if isinstance(record.outcome, Answer)]

    @property
    def failures(self) -> list[Failure]:
        return [record.outcome for record in self.records if isinstance(record.outcome, Failure)]

    @property
    def duration_s(self) -> float:
        """From the first request's time to the last end."""
        return max(record.ended_s for record in self.records) - min(record.due_s for record in self.records)

    def latencies_ms(self) -> dict[str, np.ndarray]:
        """By name, of all whole answers. "_from_sent": from the moment of sending, which leaves out what a request
        waited for its turn, and with it what a slow service did to the requests behind."""
        answers = self.answers
        streamed = [(record, answer) for record, answer in answers if answer.is_streamed]
        several = [answer for _, answer in streamed if answer.num_output_tokens > 1]
        table = {
            "ttft": [answer.text_s[0] - record.due_s for record, answer in streamed],
            "tpot": [(a.text_s[-1] - a.text_s[0]) / (a.num_output_tokens - 1) for a in several],
            "itl": [b - a for _, answer in streamed for a, b in pairwise(answer.text_s)],
            "e2el": [answer.text_s[-1] - record.due_s for record, answer in answers],
            f"ttft{_FROM_SENT}": [answer.text_s[0] - record.sent_s for record, answer in streamed],
            f"e2el{_FROM_SENT}": [answer.text_s[-1] - record.sent_s for record, answer in answers],
        }
        return {name: 1e3 * np.array(values) for name, values in table.items()}

    @property
    def num_good(self) -> int:
        """Answers within all limits."""
        return sum(self._is_good(record, answer) for record, answer in self.answers)

    def _is_good(self, record: Record, answer: Answer) -> bool:
        one = Figures([record]).latencies_ms()
        return all((one[name] <= limit).all() for name, limit in (self.slos or {}).items())

    def to_dict(self) -> dict[str, Any]:
        """All figures; names and units are those of `vllm bench serve --save-result`."""
        answers, seconds = [answer for _, answer in self.answers], self.duration_s
        num_input = sum(answer.num_prompt_tokens or 0 for answer in answers)
        num_output = sum(answer.num_output_tokens for answer in answers)
        figures: dict[str, Any] = {
            "duration": seconds,
            "completed": len(answers),
            "failed": len(self.failures),
            "failures": dict(Counter(failure.kind for failure in self.failures)),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(answers) / seconds,
            "request_goodput": None if not self.slos else self.num_good / seconds,
            "output_throughput": num_output / seconds,
            "total_token_throughput": (num_input + num_output) / seconds,
            "max_concurrent_requests": self._most_at_once(),
            "max_sent_late_ms": 1e3 * max(record.sent_s - record.due_s for record in self.records),
        }
        for name, values in self.latencies_ms().items():
            figures |= _statistics(name, values, self.percentiles)
        return figures

    def _most_at_once(self) -> int:
        starts = [(record.sent_s, 1) for record in self.records]
        ends = [(record.ended_s, -1) for record in self.records]
        steps = [step for _, step in sorted(starts + ends)]
        return int(np.cumsum(steps).max())

    def samples(self) -> dict[str, Any]:
        """Each request, seconds from the first one's time: enough to compute every figure again."""
        begin_s = min(record.due_s for record in self.records)
        rows = []
        for record in self.records:
            row: dict[str, Any] = {"due": record.due_s - begin_s, "sent": record.sent_s - begin_s}
            match record.outcome:
                case Answer() as answer:
                    row |= {"input_len": answer.num_prompt_tokens, "output_len": answer.num_output_tokens}
                    row["text_times"] = [round(at - begin_s, 6) for at in answer.text_s]
                case Failure(kind, message):
                    row |= {"failure": kind, "message": message}
            rows.append(row)
        return {"requests": rows}

    def table(self) -> list[str]:
        """What the command prints."""
        figures = self.to_dict()
        lines = [
            _line("Successful requests", figures["completed"]),
            _line("Failed requests", figures["failed"]),
            *(_line(f"  {kind}", count) for kind, count in figures["failures"].items()),
            _line("Benchmark duration (s)", figures["duration"]),
            _line("Total input tokens", figures["total_input_tokens"]),
            _line("Total generated tokens", figures["total_output_tokens"]),
            _line("Request throughput (req/s)", figures["request_throughput"]),
        ]
        if self.slos:
            limits = ", ".join(f"{name} {limit:g} ms" for name, limit in self.slos.items())
            lines.append(_line(f"Request goodput (req/s), {limits}", figures["request_goodput"]))
        lines += [
            _line("Output token throughput (tok/s)", figures["output_throughput"]),
            _line("Total token throughput (tok/s)", figures["total_token_throughput"]),
            _line("Peak concurrent requests", figures["max_concurrent_requests"]),
        ]
        for name, values in self.latencies_ms().items():
            if len(values):
                lines += _section(name, values, self.percentiles)
        return lines


def _statistics(name: str, values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    """None where there are no values."""
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    found: list[Any] = [None] * len(keys)
    if len(values):
        found = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, percentiles)]
    return {f"{key}_{name}_ms": None if one is None else float(one) for key, one in zip(keys, found, strict=True)}


def _section(name: str, values: np.ndarray, percentiles: Sequence[float]) -> list[str]:
    base = name.removesuffix(_FROM_SENT)
    title, meaning = _TITLES[base], _MEANINGS[base]
    if name != base:
        title, meaning = f"{title} from sent", f"{meaning}, from the sending; above: from the scheduled time"
    return [
        f"--- {meaning} ---",
        _line(f"Mean {title} (ms)", float(np.mean(values))),
        _line(f"Median {title} (ms)", float(np.median(values))),
        *(_line(f"P{p:g} {title} (ms)", float(np.percentile(values, p))) for p in percentiles),
    ]


def _line(name: str, value: float) -> str:
    return f"{name + ':':<44} {value}" if isinstance(value, int) else f"{name + ':':<44} {value:.2f}"


def batch_latencies(batches: Sequence[Figures], percentiles: Sequence[float]) -> dict[str, Any]:
    """Of `bench latency`: seconds of each batch, from its start to its last answer; batches with failures count as
    failed. Names are those of `vllm bench latency`."""
    whole = [batch.duration_s for batch in batches if not batch.failures]
    return {
        "avg_latency": float(np.mean(whole)) if whole else None,
        "latencies": whole,
        "percentiles": {f"{p:g}": float(np.percentile(whole, p)) for p in (50, *percentiles)} if whole else {},
        "failed": len(batches) - len(whole),
    }


def batch_table(values: Mapping[str, Any]) -> list[str]:
    """What the command prints of `batch_latencies`."""
    lines = [_line("Batches", len(values["latencies"])), _line("Failed batches", values["failed"])]
    if values["latencies"]:
        lines.append(_line("Mean latency (ms)", 1e3 * values["avg_latency"]))
    return lines + [_line(f"P{p} latency (ms)", 1e3 * seconds) for p, seconds in values["percentiles"].items()]
