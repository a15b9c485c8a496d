"""Parses a chat model's output, streamed or whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringcore.chat.events import ChatEvent, ChatMessage, MessageBuilder
from ringcore.chat.formats import ChatFormat
from ringcore.chat.tools import ToolSchemas

__all__ = ["ChatParser", "parse_message", "random_call_id"]


def random_call_id() -> str:
    """A new id for a call: "call_" and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


class ChatParser:
    """Parses one completion incrementally.

    It never raises for a model's output. However the text is cut into pieces, the events add up (`MessageBuilder`) to
    the same message. Work is linear in the text. Held back are only a partial marker, line breaks that may precede a
    marker, the header of a message in formats that have them, and a call whose name is not known yet.

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
        self._parser = chat_format.syntax.parser(ToolSchemas(tools), prompt_end, new_id)
        self._is_finished = False

    def feed(self, text: str) -> list[ChatEvent]:
        """The events that this piece of text releases."""
        assert not self._is_finished, "the text has ended"
        return self._parser.feed(text)

    def finish(self) -> list[ChatEvent]:
        """The events of the text held back, at the end of the output. Nothing may be fed afterwards."""
        assert not self._is_finished, "the text has ended"
        self._is_finished = True
        return self._parser.finish()


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
