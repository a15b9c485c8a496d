"""Parses a chat model's output, streamed or whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringcore.chat.events import ChatEvent, ChatMessage, MessageBuilder, ReasoningDelta
from ringcore.chat.formats import REASONING_FORMATS, TOOL_CALL_FORMATS, ChatFormat
from ringcore.chat.reasoning import ReasoningSplitter, reasoning_of_prompt
from ringcore.chat.tool_parser import ToolCallParser
from ringcore.chat.tools import ToolSchemas

__all__ = ["ChatParser", "parse_message", "random_call_id"]


def random_call_id() -> str:
    """A new id for a call: "call_" and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


class ChatParser:
    """Parses one completion incrementally.

    It never raises for a model's output. However the text is cut into pieces, the events add up (`MessageBuilder`) to
    the same message. Work is linear in the text. Held back are only a partial marker, line breaks that may precede a
    marker, and a call whose name is not known yet.

    tools: the request's tools, in OpenAI's format. A call of any other name is content, so an empty list disables
        calls; None accepts every name.
    prompt_end: the end of the prompt's text (the last 32 characters suffice) with its special tokens: the template may
        have opened or closed the reasoning there.
    new_id: generates the ids of calls.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Iterable[Mapping[str, Any]] | None = None,
        prompt_end: str = "",
        new_id: Callable[[], str] = random_call_id,
    ) -> None:
        reasoning = None if chat_format.reasoning is None else REASONING_FORMATS[chat_format.reasoning]
        calls = None if chat_format.tool_calls is None else TOOL_CALL_FORMATS[chat_format.tool_calls]
        self._reasoning = ReasoningSplitter(reasoning, reasoning_of_prompt(prompt_end))
        self._content = ToolCallParser(calls, ToolSchemas(tools), new_id)
        self._has_content = False
        self._is_finished = False

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that this piece of text releases."""
        assert not self._is_finished, "the text has ended"
        return self._events(*self._reasoning.feed(text))

    def finish(self) -> list[ChatEvent]:
        """The events of the text held back, at the end of the output. Nothing may be fed afterwards."""
        assert not self._is_finished, "the text has ended"
        self._is_finished = True
        return [*self._events(*self._reasoning.finish()), *self._content.finish()]

    def _events(self, reasoning: str, content: str) -> list[ChatEvent]:
        events: list[ChatEvent] = [ReasoningDelta(reasoning)] if reasoning else []
        if content and not self._has_content:
            self._has_content = True
            if self._reasoning.has_closed:
                self._content.begin_after_marker()
        if content:
            events += self._content.feed(content)
        return events


def parse_message(
    text: str,
    chat_format: ChatFormat,
    tools: Iterable[Mapping[str, Any]] | None = None,
    prompt_end: str = "",
    new_id: Callable[[], str] = random_call_id,
) -> ChatMessage:
    """Parses a whole text into a message; arguments as for `ChatParser`."""
    parser = ChatParser(chat_format, tools, prompt_end, new_id)
    builder = MessageBuilder()
    builder.add(parser.feed(text))
    builder.add(parser.finish())
    return builder.message
