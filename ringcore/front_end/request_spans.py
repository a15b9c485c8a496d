"""OpenTelemetry spans of finished requests, made of the times that a request carries anyway.

    llm_request     from arrival to the end of its text; its parent is the caller's span, over HTTP by traceparent
      arrival       validation and tokenization, until it is on its way to the engine      (front end)
      queue         until its first step                                                   (engine)
      prefill       until its first token                                                  (workers)
      decode        until its last token has arrived                                       (workers)
      text          until its text is ready                                                (front end)

Nothing is recorded while a request runs. One that has ended is queued for a thread of its own, which makes the spans,
so that neither an exporter nor a span processor of the embedder's own slows serving: beyond `MAX_QUEUED` requests are
dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from ringcore.errors import RingcoreError
from ringcore.front_end.request_state import RequestState
from ringcore.protocol.requests import OutputColumns
from ringcore.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["MAX_QUEUED", "RequestSpans"]

MAX_QUEUED = 4096
_JOIN_S = 2.0

_log = logging.getLogger(__name__)


class _Ended(NamedTuple):
    state: RequestState
    error: RingcoreError | None
    at_s: float
    wall_ahead_ns: int  # of the wall clock, which spans have, over the monotonic one


class RequestSpans:
    """The spans of one front end's requests: an observer of it.

    model: its name in the spans. num_dropped: requests without spans, because the thread did not keep up.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        tracer = provider.get_tracer("ringcore", __version__)
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        self.num_dropped = 0
        self._thread = threading.Thread(
            target=_run, args=(self._queue, tracer, model), name="ringcore-spans", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def began(self, state: RequestState) -> None:
        state.trace_context = otel_context.get_current()

    def received(self, columns: OutputColumns) -> None: ...

    def first_token(self, num_prompt_tokens: int, arrival_s: float, now: float) -> None: ...

    def ended(self, state: RequestState, error: RingcoreError | None) -> None:
        if self._queue.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
            return
        ahead_ns = time.clock_gettime_ns(time.CLOCK_REALTIME) - time.monotonic_ns()
        self._queue.put(_Ended(state, error or state.error, time.monotonic(), ahead_ns))

    def close(self) -> None:
        """Waits until the spans are made. The provider is its owner's to shut down."""
        if not self._finalizer.alive:
            return
        self._finalizer()
        self._thread.join(_JOIN_S)
        if self.num_dropped:
            _log.warning("the spans of %d requests were dropped: the span processor was too slow", self.num_dropped)


def _run(queue: SimpleQueue[_Ended | None], tracer: Tracer, model: str) -> None:
    while (ended := queue.get()) is not None:
        try:
            _make_spans(tracer, ended, model)
        except Exception:  # of an embedder's span processor
            _log.exception("the spans of a request could not be made")
        del ended


def _make_spans(tracer: Tracer, ended: _Ended, model: str) -> None:
    state, ahead_ns = ended.state, ended.wall_ahead_ns

    def unix_ns(at_s: float) -> int:
        return round(at_s * 1e9) + ahead_ns

    times = state.metrics()
    request = tracer.start_span(
        "llm_request",
        context=cast("Context", state.trace_context),
        kind=SpanKind.SERVER,
        attributes=_attributes(state, ended.at_s, model),
        start_time=unix_ns(times.arrival_s),
    )
    inside = set_span_in_context(request)
    for name, process, began_s, ended_s in _parts(state, ended.at_s):
        attributes = {"ringcore.process": process}
        part = tracer.start_span(name, context=inside, attributes=attributes, start_time=unix_ns(began_s))
        part.end(unix_ns(max(began_s, ended_s)))
    if ended.error is not None:
        request.set_attribute("error.type", type(ended.error).__name__)
        request.set_status(StatusCode.ERROR, ended.error.message)
    request.end(unix_ns(max(times.arrival_s, ended.at_s)))


def _parts(state: RequestState, ended_s: float) -> Iterator[tuple[str, str, float, float]]:
    """Name, process, begin and end of each part that the request has reached; the last one reaches to its end."""
    times = state.metrics()
    begins = [
        ("arrival", "front end", times.arrival_s),
        ("queue", "engine", state.submitted_s),
        ("prefill", "workers", times.first_scheduled_s),
        ("decode", "workers", times.first_token_s),
        ("text", "front end", None if times.first_token_s is None else times.finished_s),
    ]
    reached = [(name, process, began_s) for name, process, began_s in begins if began_s is not None]
    ends = [*(began_s for _, _, began_s in reached[1:]), ended_s]
    for (name, process, began_s), end_s in zip(reached, ends, strict=True):
        yield name, process, began_s, end_s


def _attributes(state: RequestState, ended_s: float, model: str) -> dict[str, Any]:
    """By the semantic conventions for generative AI where there is a name, and under vLLM's names."""
    times, params, num_prompt_tokens = state.metrics(), state.params, state.num_prompt_tokens
    num_tokens = sum(one.num_tokens for one in state.completions)
    first_s, scheduled_s = times.first_token_s, times.first_scheduled_s
    last_s = ended_s if times.finished_s is None else times.finished_s
    attributes = {
        "gen_ai.operation.name": "chat" if state.is_chat else "text_completion",
        "gen_ai.provider.name": "ringcore",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": state.request_id,
        "gen_ai.request.id": state.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in state.completions],
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": state.completions[0].num_cached_tokens,
        "gen_ai.usage.num_sequences": len(state.completions),
        "gen_ai.latency.e2e": last_s - times.arrival_s,
        "gen_ai.latency.time_in_queue": None if scheduled_s is None else scheduled_s - times.arrival_s,
        "gen_ai.latency.time_to_first_token": None if first_s is None else first_s - times.arrival_s,
        "gen_ai.latency.time_in_model_prefill": (
            None if first_s is None or scheduled_s is None else first_s - scheduled_s
        ),
        "gen_ai.latency.time_in_model_decode": None if first_s is None else last_s - first_s,
        "gen_ai.latency.time_in_model_inference": None if scheduled_s is None else last_s - scheduled_s,
        "ringcore.num_preemptions": times.num_preemptions,
    }
    return {name: value for name, value in attributes.items() if value is not None}
