"""The observers of a front end: its log, its metrics, its spans."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError
from ringcore.front_end.request_state import FirstTokenObserver, RequestState
from ringcore.host.file_names import as_utf8
from ringcore.protocol.requests import OutputColumns

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["FrontEndObserver", "observers_of"]

_log = logging.getLogger(__name__)


class FrontEndObserver(FirstTokenObserver, Protocol):
    """A member of the `observers` of an engine. Its methods run within locks, `ended` in finalizers too. None may
    raise, and none but `close` wait. Times are of the monotonic clock."""

    def began(self, state: RequestState) -> None:
        """A request is about to be sent; called by the code that makes it, in its context."""
        ...

    def received(self, columns: OutputColumns) -> None:
        """A message has come; called once for each, in their order."""
        ...

    def ended(self, state: RequestState, error: RingcoreError | None) -> None:
        """A request has ended, in whatever way; called once for each. It is not over if its reader has dropped it, or
        its engine died. error: where the state itself has none."""
        ...

    def close(self) -> None:
        """No request ends afterwards. Idempotent; waits at most 2 s."""
        ...


def observers_of(provider: TracerProvider | None, config: EngineConfig) -> list[FrontEndObserver]:
    """Of a new engine: the log, if it takes records of requests by now, and the spans that its owner asked for."""
    observers: list[FrontEndObserver] = [_EndLog()] if _log.isEnabledFor(logging.DEBUG) else []
    if provider is not None:
        from ringcore.front_end.request_spans import RequestSpans  # with opentelemetry

        observers.append(RequestSpans(provider, as_utf8(config.model.model)))
    return observers


class _EndLog:
    """A record for each request that was read to its end; one that was dropped may be in a finalizer."""

    def began(self, state: RequestState) -> None: ...

    def received(self, columns: OutputColumns) -> None: ...

    def first_token(self, num_prompt_tokens: int, arrival_s: float, now: float) -> None: ...

    def ended(self, state: RequestState, error: RingcoreError | None) -> None:
        if not state.is_over:
            return
        request, failure = state.summary(error), error or state.error
        how = ", ".join(request.finish_reasons) if failure is None else failure.message
        facts = request.num_prompt_tokens, sum(request.num_tokens), how
        _log.debug("%d prompt tokens, %d tokens, %s", *facts, extra={"request_id": state.request_id})

    def close(self) -> None: ...
