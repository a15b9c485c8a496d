"""Who is told of the requests that have ended; by itself the log."""

from __future__ import annotations

import logging

from ringcore.errors import RingcoreError
from ringcore.front_end.request_state import RequestState

__all__ = ["RequestObserver"]

_log = logging.getLogger(__name__)


class RequestObserver:
    """No method blocks; `ended` may run in finalizers."""

    def context(self) -> object:
        """What the calling code's spans are in, kept as `RequestState.trace_context`."""
        return None

    def ended(self, state: RequestState, error: RingcoreError | None = None) -> None:
        """A request has ended, in whatever way; called once for each. error: where the state itself has none."""
        if not state.is_over or not _log.isEnabledFor(logging.DEBUG):  # one that was dropped may be in a finalizer
            return
        reasons = ", ".join(one.finish_reason or "abort" for one in state.completions)
        num_tokens, failure = sum(one.num_tokens for one in state.completions), error or state.error
        _log.debug(
            "%d prompt tokens, %d tokens, %s",
            state.num_prompt_tokens,
            num_tokens,
            reasons if failure is None else failure.message,
            extra={"request_id": state.request_id},
        )

    def close(self) -> None:
        """No request ends afterwards. Idempotent; waits at most 2 s."""
