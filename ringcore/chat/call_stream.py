"""The events of an output's calls, one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.chat.call_body import CallBody
from ringcore.chat.events import ChatEvent, ToolCallArguments, ToolCallEnd, ToolCallStart

__all__ = ["CallStream"]


class CallStream:
    """Streams one call at a time. A call is held back until it is certain (`CallBody.name`).

    `_raw` is the current call's text as the model wrote it, with its marker.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._body: CallBody | None = None
        self._raw: list[str] = []
        self._index = -1  # of the last call
        self._is_started = False  # whether the current call's start event was emitted

    @property
    def has_called(self) -> bool:
        return self._index >= 0

    def begin(self, body: CallBody, raw: Sequence[str]) -> None:
        """raw: the call's text before its body."""
        self._body, self._raw, self._is_started = body, list(raw), False

    def feed(self, text: str, events: list[ChatEvent], before: Callable[[], str] = str) -> int:
        """Appends the events that `text` releases, and returns the position up to which it was consumed. before: called
        once a call is certain, it takes text before the call that belongs to it where it breaks off."""
        body = self._body
        assert body is not None
        position = body.scan(text)
        self._raw.append(text[:position])
        if body.name is None:
            return position
        if not self._is_started:
            self._is_started = True
            self._index += 1
            self._raw.insert(0, before())
            events.append(ToolCallStart(self._index, self._new_id(), body.name))
        if arguments := body.take_arguments():
            events.append(ToolCallArguments(self._index, arguments))
        if body.is_complete:
            events.append(ToolCallEnd(self._index, is_complete=True))
        return position

    @property
    def is_complete(self) -> bool:
        return self._body is not None and self._body.is_complete

    @property
    def is_broken(self) -> bool:
        return self._body is not None and self._body.is_broken

    def break_off(self, events: list[ChatEvent], rest: str = "") -> str | None:
        """Ends an invalid or incomplete call, whose text becomes content: appends its end if it has started, else
        returns that text. rest: more of its text, unconsumed."""
        raw = "".join([*self._raw, rest])
        if not self._is_started:
            return raw
        events.append(ToolCallEnd(self._index, is_complete=False, text=raw))
        return None
