"""What can be observed of a front end: the engine's messages, and the life of each request."""

from __future__ import annotations

from typing import Protocol

from ringcore.metrics import EndedRequest
from ringcore.params.outputs import FinishReason
from ringcore.protocol.requests import OutputColumns

__all__ = ["FrontEndObserver"]


class FrontEndObserver(Protocol):
    """A member of the `observers` of an engine. Its methods must neither raise nor wait: they run within locks, and
    `dropped` in finalizers too. Times are of the monotonic clock."""

    def received(self, columns: OutputColumns) -> None:
        """A message has come; called once for each, in their order."""
        ...

    def first_token(self, num_prompt_tokens: int, arrival_s: float, now: float) -> None: ...

    def ended(self, request: EndedRequest) -> None: ...

    def dropped(self, num_completions: int, reason: FinishReason) -> None:
        """Completions ended without a last output: nobody reads them, or their engine died."""
        ...
