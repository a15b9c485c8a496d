"""Parses harmony's messages incrementally.

    header ──<|message|>──▶ text, or call       by what the header says; a header that is none is text
    text   ──<|end|>, <|call|>, <|return|>──▶ text outside of messages
    text   ──<|start|>assistant──▶ header        also where the message before has no end
    call   ──complete, or broken──▶ text outside of messages

Text outside of messages is content, and so is a message to a recipient that is no tool, with its header. Line breaks
next to a message are layout there. The contents of several messages, and their reasoning, are joined by a line break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ringcore.chat.call_body import CallBody
from ringcore.chat.call_stream import CallStream
from ringcore.chat.events import ChatEvent, ContentDelta, ReasoningDelta
from ringcore.chat.harmony_header import CHANNEL, ENDS, MAX_HEADER_CHARS, MESSAGE, NEXT, Header, may_be_header
from ringcore.chat.json_scanner import JsonScanner, skip_blanks
from ringcore.chat.markers import TextRun, find_first, partial_marker_length
from ringcore.chat.reasoning import PromptReasoning
from ringcore.chat.tools import ToolSchemas

__all__ = ["HarmonyParser"]

# Begins of a header; of the first message the prompt has the role already.
_OPENINGS = (NEXT, CHANNEL)
_FIRST_OPENINGS = (*_OPENINGS, MESSAGE, " to=")

_Kind = Literal["reasoning", "content", "outside"]


class HarmonyParser:
    """`OutputParser` of one output. prompt: the message that the prompt has opened."""

    def __init__(self, tools: ToolSchemas, prompt: PromptReasoning, new_id: Callable[[], str]) -> None:
        self._tools = tools
        self._calls = CallStream(new_id)
        self._state: Literal["header", "text", "call"] = "header" if prompt == "none" else "text"
        kinds: dict[PromptReasoning, _Kind] = {"none": "outside", "open": "reasoning", "closed": "content"}
        self._kind = kinds[prompt]  # of the current text
        self._openings: tuple[str, ...] = _FIRST_OPENINGS
        self._pending = ""  # unconsumed text: at most a header, or a partial marker
        self._run = TextRun()  # of text outside of messages
        self._joint = ""  # before the next text of a message
        self._given = set[type[ContentDelta | ReasoningDelta]]()  # kinds of text so far

    def feed(self, text: str) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        self._pending += text
        advances = {"header": self._in_header, "text": self._in_text, "call": self._in_call}
        while self._pending and advances[self._state](events):
            pass
        return events

    def finish(self) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        pending, self._pending = self._pending, ""
        if self._state == "call":
            self._break_off(events, pending)
        elif not (self._state == "header" and pending.startswith(_OPENINGS)):  # else a header that is cut off
            self._add(pending, events)
        if rest := self._run.release():
            events.append(ContentDelta(rest))
        return events

    # -----------------------------------------------------------------------------------------------------------
    # The states. Each consumes what it can of the pending text; True: the next state continues.

    def _in_header(self, events: list[ChatEvent]) -> bool:
        pending = self._pending
        opening = next((one for one in self._openings if pending.startswith(one)), None)
        if opening is None:
            if any(one.startswith(pending) for one in self._openings):
                return False
            return self._leave_header("", events)
        end = pending.find(MESSAGE)
        header = pending if end < 0 else pending[: end + len(MESSAGE)]
        if len(header) >= MAX_HEADER_CHARS or not may_be_header(header):
            return self._leave_header(opening, events)
        if end < 0:
            return False
        self._pending = pending[len(header) :]
        self._begin_message(Header.read(pending[:end]), header, events)
        return True

    def _in_text(self, events: list[ChatEvent]) -> bool:
        markers = (*ENDS, *(_OPENINGS if self._kind == "outside" else (NEXT,)))
        found = find_first(self._pending, markers)
        cut = len(self._pending) - partial_marker_length(self._pending, markers) if found is None else found[0]
        self._add(self._pending[:cut], events)
        self._pending = self._pending[cut:]
        if found is None:
            return False
        if found[1] in ENDS:
            self._pending = self._pending[len(found[1]) :]
            self._leave_message()
        else:
            self._state, self._openings = "header", _OPENINGS
        return True

    def _in_call(self, events: list[ChatEvent]) -> bool:
        position = self._calls.feed(self._pending, events)
        self._pending = self._pending[position:]
        if self._calls.is_complete:
            self._leave_message()
        elif self._calls.is_broken:
            self._break_off(events)
        return self._state != "call"

    # -----------------------------------------------------------------------------------------------------------

    def _leave_header(self, opening: str, events: list[ChatEvent]) -> bool:
        """It was text."""
        self._pending = self._pending[len(opening) :]
        self._add(opening, events)
        self._state = "text"
        return True

    def _begin_message(self, header: Header, raw: str, events: list[ChatEvent]) -> None:
        self._go_outside()
        function = header.function(self._tools)
        if function is not None:
            self._calls.begin(_Arguments(self._tools, function), [raw])
            self._state = "call"
        elif header.is_reasoning or header.is_content:
            self._kind = "reasoning" if header.is_reasoning else "content"
            self._joint = "\n" if self._delta in self._given else ""
        else:
            self._add(raw, events)

    def _go_outside(self) -> None:
        self._state, self._kind, self._run, self._joint = "text", "outside", TextRun(), ""

    def _leave_message(self) -> None:
        self._go_outside()
        self._run.begin_after_marker()

    def _break_off(self, events: list[ChatEvent], rest: str = "") -> None:
        self._go_outside()
        if (raw := self._calls.break_off(events, rest)) is not None:
            self._add(raw, events)

    def _add(self, text: str, events: list[ChatEvent]) -> None:
        if self._kind == "outside":
            text = self._run.push(text)
        if not text:
            return
        events.append(self._delta(self._joint + text))
        self._joint = ""
        self._given.add(self._delta)

    @property
    def _delta(self) -> type[ContentDelta | ReasoningDelta]:
        return ReasoningDelta if self._kind == "reasoning" else ContentDelta


class _Arguments(CallBody):
    """The arguments of a call, whose header has named the tool: a JSON object."""

    def __init__(self, tools: ToolSchemas, tool: str) -> None:
        super().__init__(tools)
        self._tool = tool
        self._scanner = JsonScanner()

    def scan(self, text: str) -> int:
        position = 0
        if self.name is None:
            position = skip_blanks(text, 0)
            if position == len(text):
                return position
            if text[position] != "{":
                self._mode = "broken"
                return position
            self.name = self._tool
        end = self._scanner.scan(text, position)
        self._arguments.append(text[position:end])
        if self._scanner.is_complete:
            self._mode = "complete"
        elif self._scanner.is_broken:
            self._mode = "broken"
        return end
