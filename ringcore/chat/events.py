"""The events of a parsed output stream, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

__all__ = [
    "ChatEvent",
    "ChatMessage",
    "ContentDelta",
    "MessageBuilder",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a known tool whose arguments have started. `index` counts a message's calls, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. The pieces of a complete call, joined, are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of a call. An incomplete call was cut off, or continued with invalid syntax.

    text: of an incomplete call, as the model wrote it, including markers, up to the error; "" for a complete one.
    """

    index: int
    is_complete: bool
    text: str = ""


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A model's whole message. An incomplete call is part of `content`, as the model wrote it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class MessageBuilder:
    """Accumulates events into a message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._start: ToolCallStart | None = None
        self._arguments: list[str] = []

    def add(self, events: Iterable[ChatEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._start, self._arguments = event, []
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
                case ToolCallEnd(_, is_complete, text):
                    self._end(is_complete, text)
                case _:
                    assert_never(event)

    def _end(self, is_complete: bool, text: str) -> None:
        start, self._start = self._start, None
        assert start is not None, "a tool call ended without a start"
        if is_complete:
            self._tool_calls.append(ToolCall(start.id, start.name, "".join(self._arguments)))
        else:
            self._content.append(text)

    @property
    def message(self) -> ChatMessage:
        """The message so far; a call that has not ended is left out."""
        return ChatMessage("".join(self._content), "".join(self._reasoning), tuple(self._tool_calls))
