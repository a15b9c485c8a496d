"""The requests of an engine as its front end sees them: latencies, lengths, how they ended."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from ringcore.errors import RingcoreError
from ringcore.metrics.histogram import BucketHistogram, HistogramCounts
from ringcore.metrics.token_gaps import TokenGaps
from ringcore.params.outputs import FinishReason, RequestMetrics
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import NO_STATS, OutputColumns

__all__ = ["FINISH_REASONS", "HISTOGRAMS", "EndedRequest", "RequestLog", "RequestTotals"]

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
_MAX_RUNS = 16  # few, so that what they hold stays in the processor's caches
_MAX_TIMES = 1024  # of a run
_MAX_GAPS = 1024

_SECONDS: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_SECONDS += (20.0, 40.0, 80.0, 160.0)
_LONG_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 960.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

# name: (what it counts, buckets)
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _SECONDS),
    "inter_token_latency_seconds": ("From one output with tokens to the next.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean of a request, without its first token.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Arrival to last token.", _LONG_SECONDS),
    "request_queue_time_seconds": ("Arrival to first step.", _LONG_SECONDS),
    "request_prefill_time_seconds": ("First step to first token.", _LONG_SECONDS),
    "request_decode_time_seconds": ("First to last token.", _LONG_SECONDS),
    "request_inference_time_seconds": ("First step to last token.", _LONG_SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of all completions of a prompt.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest completion of a prompt.", _TOKENS),
    "request_params_max_tokens": ("max_tokens, where it was given.", _TOKENS),
    "request_params_n": ("Completions asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
}


class EndedRequest(NamedTuple):
    """is_over: all its completions have ended; else its reader has dropped it, or its engine died."""

    is_over: bool
    times: RequestMetrics
    num_prompt_tokens: int
    num_tokens: list[int]  # of each completion
    finish_reasons: list[FinishReason]  # likewise
    max_tokens: int | None


class EndedState(Protocol):
    """`front_end.request_state.RequestState`, as read here."""

    def summary(self, error: RingcoreError | None) -> EndedRequest: ...


class RequestTotals(NamedTuple):
    prompt_tokens: int
    generation_tokens: int
    ended: dict[FinishReason, int]  # completions
    histograms: dict[str, HistogramCounts]


class _Run:
    """A message, and those after it that say as much: the same rows got as many tokens, and no request began or ended.

    rows: None if requests ended in the first message; it has none after it. times: of these messages, the first
    included. The thread that receives appends, another one may take them.
    """

    __slots__ = ("columns", "num_tokens", "rows", "times")

    def __init__(self, columns: OutputColumns, rows: bytes, now: float) -> None:
        self.columns: OutputColumns | None = columns  # None: the first message has been counted
        self.rows = None if columns.others else rows
        self.num_tokens, self.times = len(columns.token_ids), [now]

    def take_times(self) -> list[float]:
        taken = self.times[:]
        del self.times[: len(taken)]
        return taken


class RequestLog:
    """Counts requests. It observes a front end (`front_end.observers.FrontEndObserver`).

    Any thread may call any method at any moment, finalizers too, so what happens is only appended: `_events` and
    `_runs` are deques, whose operations are atomic, as those of a run's times are. While all requests decode, a message
    is a time at the end of the last run. `totals` counts it all; so does `received`, after many messages, unless
    another thread is at it. One thread at a time calls `received`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = _Run(output_columns([], NO_STATS), b"", 0.0)  # the last one
        self._runs = deque([self._run])
        self._events: deque[Callable[[], None]] = deque()
        self._counting = threading.Lock()
        self._gaps = TokenGaps()
        self._prompt_tokens = self._generation_tokens = 0
        self._ended: Counter[FinishReason] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._histograms = {name: BucketHistogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._values: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}

    # Observing.

    def began(self, state: EndedState) -> None: ...

    def received(self, columns: OutputColumns) -> None:
        run, rows, now = self._run, columns.rows.tobytes(), self._clock()
        if rows == run.rows and len(columns.token_ids) == run.num_tokens and not columns.started and not columns.others:
            run.times.append(now)
            if len(run.times) < _MAX_TIMES:
                return
        else:
            if columns.logprobs is not None:
                columns = replace(columns, logprobs=None)  # it may be large
            self._run = _Run(columns, rows, now)
            self._runs.append(self._run)
            if len(self._runs) < _MAX_RUNS:
                return
        if self._counting.acquire(blocking=False):
            try:
                self._count_messages()
            finally:
                self._counting.release()

    def first_token(self, num_prompt_tokens: int, arrival_s: float, now: float) -> None:
        self._events.append(lambda: self._count_first_token(num_prompt_tokens, now - arrival_s))

    def ended(self, state: EndedState, error: RingcoreError | None) -> None:
        request = state.summary(error)
        self._events.append(lambda: self._count_ended(request))

    def close(self) -> None: ...

    # Counting.

    def totals(self) -> RequestTotals:
        with self._counting:
            self._count_messages()
            self._count_gaps()
            while self._events:
                self._events.popleft()()
            for name, values in self._values.items():
                self._histograms[name].add(values)
                values.clear()
            counts = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
            return RequestTotals(self._prompt_tokens, self._generation_tokens, dict(self._ended), counts)

    def _count_messages(self) -> None:
        while len(self._runs) > 1:  # those before the last one get no more times
            self._count_run(self._runs.popleft())
        self._count_run(self._runs[0])
        if len(self._gaps) >= _MAX_GAPS:
            self._count_gaps()

    def _count_run(self, run: _Run) -> None:
        times = run.take_times()
        self._generation_tokens += run.num_tokens * len(times)
        if run.columns is not None:
            columns, run.columns = run.columns, None
            self._count_message(columns, times.pop(0))
        if times and run.rows:
            self._gaps.repeat(times)

    def _count_message(self, columns: OutputColumns, now: float) -> None:
        gaps = self._gaps
        if columns.started:
            gaps.start(columns.started)
        gaps.tokens(columns.rows, now)
        for other in columns.others:
            gaps.end(other.request_id, now, has_tokens=bool(other.new_token_ids))
            self._generation_tokens += len(other.new_token_ids)

    def _count_gaps(self) -> None:
        self._histograms["inter_token_latency_seconds"].add(*self._gaps.take())

    def _count_first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        self._prompt_tokens += num_prompt_tokens
        self._values["time_to_first_token_seconds"].append(seconds)

    def _count_ended(self, request: EndedRequest) -> None:
        self._ended.update(request.finish_reasons)
        if "error" in request.finish_reasons or not request.is_over:
            return
        values, times, n = self._values, request.times, len(request.num_tokens)
        num_tokens = sum(request.num_tokens)
        values["request_prompt_tokens"].append(request.num_prompt_tokens)
        values["request_generation_tokens"].append(num_tokens)
        values["request_max_num_generation_tokens"].append(max(request.num_tokens))
        values["request_params_n"].append(n)
        if request.max_tokens is not None:
            values["request_params_max_tokens"].append(request.max_tokens)
        if times.finished_s is None or times.first_token_s is None:
            return
        decode_s = times.finished_s - times.first_token_s
        values["e2e_request_latency_seconds"].append(times.finished_s - times.arrival_s)
        values["request_decode_time_seconds"].append(decode_s)
        if times.first_scheduled_s is not None:
            values["request_queue_time_seconds"].append(times.first_scheduled_s - times.arrival_s)
            values["request_prefill_time_seconds"].append(times.first_token_s - times.first_scheduled_s)
            values["request_inference_time_seconds"].append(times.finished_s - times.first_scheduled_s)
        if num_tokens > n:
            values["request_time_per_output_token_seconds"].append(decode_s * n / (num_tokens - n))
