"""Tracing of an engine: its own tracer, the moments of its requests, and what the front end records meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ringcore.engine_core.step_observer import StepObserver, StepRecord
from ringcore.errors import InvalidRequestError
from ringcore.protocol.messages import FrontEndTrace, StartTrace, TakeTrace
from ringcore.protocol.requests import OutputColumns
from ringcore.scheduler.request import Request
from ringcore.tracing import Tracer, check_seconds, now_ns
from ringcore.tracing.kinds import ADMITTED, ARRIVED, ENDED, FIRST_TOKEN, SENT

__all__ = ["EngineTracing"]

_SENT = SENT.number
_ANSWER_NS = 10 * 10**9  # a front end that answers later is left out


class EngineTracing:
    """One trace at a time. to_front_end: sends the front end a message; without one it is dropped. observers: of the
    engine's steps; it is one of them (`StepObserver`) while it traces, until `stop` or the deadline.

    A front end answers when it next reads its socket: an `AsyncEngine` at once, an `LLM` while one of its calls waits.
    """

    def __init__(self) -> None:
        self.tracer = Tracer()
        self.tracer.on_end = self._leave
        self.to_front_end: Callable[[StartTrace | TakeTrace], None] = _no_front_end
        self._number = 0
        self._front_end: bytes | None = None
        self.observers: list[StepObserver] = []
        self._record, self._deadline_s = self.tracer.record, 0.0
        self._awaited: dict[int, str] = {}  # by row, the requests that have no token yet

    def start(self, seconds: float, requests: Iterable[tuple[Request, int]]) -> None:
        """requests: the unfinished ones, with the number of their tokens. Raises `InvalidRequestError` while another
        trace is recorded."""
        check_seconds(seconds)
        if self.tracer.is_on and (left_s := self.tracer.seconds_left):
            raise InvalidRequestError(
                f"another trace is recorded, for {left_s:.1f} s at most; try again then", field="seconds", value=seconds
            )
        self._awaited.clear()
        began_ns = now_ns()
        deadline_ns = began_ns + round(seconds * 1e9)
        self.tracer.start(deadline_ns)
        self._record, self._deadline_s = self.tracer.record, deadline_ns / 1e9
        if self not in self.observers:
            self.observers.append(self)
        for request, num_tokens in requests:
            self.note_arrival(request.request_id, request.arrival_s, request.num_prompt_tokens)
            if request.row is not None:
                self._note_admission(request, num_tokens, began_ns)
        self.to_front_end(StartTrace(deadline_ns))

    def stop(self) -> bytes:
        """Ends the trace; -> the engine's own `ProcessTrace`, encoded. Asks for that of the front end."""
        trace = self.tracer.take("engine")
        self._leave()
        self._number += 1
        self._front_end = None
        self.to_front_end(TakeTrace(self._number, now_ns() + _ANSWER_NS))
        return msgspec.msgpack.encode(trace)

    def _leave(self) -> None:
        """The trace was stopped, or is past its deadline and no one has stopped it: no step is recorded any more."""
        if self in self.observers:
            self.observers.remove(self)
        self._awaited.clear()

    def take_front_end(self, answer: FrontEndTrace) -> None:
        """The answer of the front end."""
        if answer.number == self._number:
            self._front_end = answer.trace

    def front_end(self) -> bytes | None:
        """The front end's `ProcessTrace` of the trace that was stopped last; once, and None before it has come."""
        trace, self._front_end = self._front_end, None
        return trace

    # -----------------------------------------------------------------------------------------------------------
    # Moments of requests. Called only while the tracer is on.

    def note_arrival(self, request_id: str, arrival_s: float, num_prompt_tokens: int) -> None:
        now = now_ns()
        self.tracer.note(ARRIVED, min(now, round(arrival_s * 1e9)), now, request_id, num_prompt_tokens)

    def _note_admission(self, request: Request, num_tokens: int, began_ns: int) -> None:
        """Of a request that runs when the trace begins; its first token may have been long ago."""
        assert request.row is not None
        admitted_ns = began_ns if request.first_scheduled_s is None else round(request.first_scheduled_s * 1e9)
        facts = request.request_id, request.row, request.num_cached_tokens, request.num_preemptions
        self.tracer.note(ADMITTED, admitted_ns, admitted_ns, *facts)
        if num_tokens > request.num_prompt_tokens:
            self.tracer.note(FIRST_TOKEN, began_ns, began_ns, request.request_id, None)
        else:
            self._awaited[request.row] = request.request_id

    # -----------------------------------------------------------------------------------------------------------
    # As an observer of steps.

    def completed(self, record: StepRecord, columns: OutputColumns) -> None:
        self._record(record)
        applied_s = record[5]
        if columns.started or columns.others or self._awaited:
            self._note(columns, int(applied_s * 1e9))
        if applied_s > self._deadline_s:
            self.tracer.check(now_ns())

    def sent(self, began_s: float, ended_s: float) -> None:
        self._record((_SENT, began_s, ended_s))

    def _note(self, columns: OutputColumns, now: int) -> None:
        """The requests that a step's output admits, and those that got their first token or ended. now: nanoseconds."""
        tracer = self.tracer
        for one in columns.started:
            facts = one.request_id, one.row, one.num_cached_tokens, one.num_preemptions
            admitted_ns = round(one.first_scheduled_s * 1e9)
            tracer.note(ADMITTED, admitted_ns, admitted_ns, *facts)
            self._awaited[one.row] = one.request_id
        sent = columns.stats.step
        if self._awaited:
            for row in self._awaited.keys() & columns.rows.tolist():
                tracer.note(FIRST_TOKEN, now, now, self._awaited.pop(row), sent)
        for ended in columns.others:
            waited = [row for row, request_id in self._awaited.items() if request_id == ended.request_id]
            for row in waited:
                del self._awaited[row]
                if ended.new_token_ids:
                    tracer.note(FIRST_TOKEN, now, now, ended.request_id, sent)
            tracer.note(ENDED, now, now, ended.request_id, "error" if ended.error is not None else ended.finish_reason)


def _no_front_end(message: StartTrace | TakeTrace) -> None:
    """In place of a front end."""
