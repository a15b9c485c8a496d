"""Finds the tool calls in a model's text incrementally.

    text ──marker──▶ call ──complete──▶ closing ──▶ text      formats with calls in tags
    bare ──{ or marker──▶ call ──complete──▶ bare             formats with bare calls: at the beginning
    bare ──anything else──▶ text                              of the output, and after another call
    call ──broken──▶ text

A call is held back until it is certain (see the `CallBody` classes), then streamed. A call that breaks before that is
text, from its marker on. Every character is processed once, so work is linear in the text however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ringcore.chat.call_body import CallBody
from ringcore.chat.call_rules import CallRule
from ringcore.chat.call_stream import CallStream
from ringcore.chat.events import ChatEvent, ContentDelta
from ringcore.chat.markers import TextRun, find_first, partial_marker_length
from ringcore.chat.tools import ToolSchemas

__all__ = ["CallSyntax", "ToolCallParser"]

_BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model family marks its calls.

    write: writes a call as a grammar rule.
    openings: markers before a call, anywhere in a text. unopened: the same, but part of the call itself.
    closing: the marker after a call; a model may omit it.
    bare: the first character of a call without a marker, where bare calls may occur. separator: optional between them.
    """

    body: Callable[[ToolSchemas], CallBody]
    write: CallRule
    openings: tuple[str, ...]
    unopened: tuple[str, ...] = ()
    closing: str = ""
    bare: str = ""
    separator: str = ""


class ToolCallParser:
    """Splits the text of one output into content and calls. Without a syntax or tools, all of it is content."""

    def __init__(self, syntax: CallSyntax | None, tools: ToolSchemas, new_id: Callable[[], str]) -> None:
        self._syntax = None if tools.is_empty else syntax
        self._tools = tools
        self._calls = CallStream(new_id)
        self._markers = (*self._syntax.openings, *self._syntax.unopened) if self._syntax else ()
        is_bare = self._syntax is not None and bool(self._syntax.bare)
        self._state: Literal["text", "bare", "call", "closing"] = "bare" if is_bare else "text"
        self._pending = ""  # unconsumed text: at most a partial marker
        self._run = TextRun()
        self._gap: list[str] = []  # whitespace and a separator before a possible call or closing marker
        self._may_separate = False

    def begin_after_marker(self) -> None:
        """The following text comes after a marker of another parser."""
        self._run.begin_after_marker()

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that `text` releases."""
        events: list[ChatEvent] = []
        self._pending += text
        advances = {"text": self._in_text, "bare": self._in_bare, "call": self._in_call, "closing": self._in_closing}
        while self._pending and advances[self._state](events):
            pass
        return events

    def finish(self) -> list[ChatEvent]:
        """The events of the text held back, at the end of the output."""
        events: list[ChatEvent] = []
        pending, self._pending = self._pending, ""
        match self._state:
            case "call":
                self._break_off(events, pending)
            case "bare" if pending or not self._calls.has_called:
                self._add_content("".join([*self._gap, pending]), events)
            case "text":
                self._add_content(pending, events)
            case "bare" | "closing":
                pass  # whitespace or a partial closing marker after a complete call
        if rest := self._run.release():
            events.append(ContentDelta(rest))
        return events

    # -----------------------------------------------------------------------------------------------------------
    # The states. Each consumes what it can of the pending text; True: the next state continues.

    def _in_text(self, events: list[ChatEvent]) -> bool:
        found = find_first(self._pending, self._markers)
        if found is None:
            cut = len(self._pending) - partial_marker_length(self._pending, self._markers)
            text, self._pending = self._pending[:cut], self._pending[cut:]
            self._add_content(text, events)
            return False
        position, marker = found
        self._add_content(self._pending[:position], events)
        assert self._syntax is not None
        opening = "" if marker in self._syntax.unopened else marker
        self._pending = self._pending[position + len(opening) :]
        self._begin_call([opening])
        return True

    def _in_bare(self, events: list[ChatEvent]) -> bool:
        assert self._syntax is not None
        if not self._skip_blanks():
            return False
        pending = self._pending
        if self._may_separate and pending.startswith(self._syntax.separator):
            self._may_separate = False
            self._gap.append(self._syntax.separator)
            self._pending = pending[len(self._syntax.separator) :]
            return True
        for opening in (*self._syntax.openings, ""):
            if pending.startswith(opening or self._syntax.bare):
                self._pending = pending[len(opening) :]
                self._begin_call([*self._gap, opening])
                return True
        if any(opening.startswith(pending) for opening in self._syntax.openings):
            return False
        self._leave_gap(events)
        return True

    def _in_call(self, events: list[ChatEvent]) -> bool:
        position = self._calls.feed(self._pending, events, self._run.release)
        self._pending = self._pending[position:]
        if self._calls.is_complete:
            self._end_call()
            return True
        if self._calls.is_broken:
            self._break_off(events)
            self._state = "text"
            return True
        return False

    def _in_closing(self, events: list[ChatEvent]) -> bool:
        assert self._syntax is not None
        if not self._skip_blanks():
            return False
        closing = self._syntax.closing
        if self._pending.startswith(closing):
            self._pending = self._pending[len(closing) :]
            self._state = "text"
            return True
        if closing.startswith(self._pending):
            return False
        self._leave_gap(events)
        return True

    # -----------------------------------------------------------------------------------------------------------

    def _skip_blanks(self) -> bool:
        """Moves whitespace to the gap; -> whether other text is pending."""
        rest = self._pending.lstrip(_BLANKS)
        self._gap.append(self._pending[: len(self._pending) - len(rest)])
        self._pending = rest
        return bool(rest)

    def _leave_gap(self, events: list[ChatEvent]) -> None:
        self._add_content("".join(self._gap), events)
        self._state = "text"

    def _begin_call(self, raw: list[str]) -> None:
        assert self._syntax is not None
        self._calls.begin(self._syntax.body(self._tools), raw)
        self._state = "call"

    def _end_call(self) -> None:
        assert self._syntax is not None
        self._gap, self._may_separate = [], bool(self._syntax.separator)
        self._run.begin_after_marker()
        self._state = "closing" if self._syntax.closing else "bare"

    def _break_off(self, events: list[ChatEvent], rest: str = "") -> None:
        raw = self._calls.break_off(events, rest)
        if raw is None:
            self._run = TextRun()
        else:
            self._add_content(raw, events)

    def _add_content(self, text: str, events: list[ChatEvent]) -> None:
        if released := self._run.push(text):
            events.append(ContentDelta(released))
