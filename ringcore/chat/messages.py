"""Converts messages in OpenAI's format to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringcore.chat.formats import ChatFormat
from ringcore.errors import InvalidRequestError

__all__ = ["to_template_messages"]


def to_template_messages(messages: Sequence[Any], template_format: ChatFormat | None = None) -> list[Any]:
    """Joins text parts of content into one text, and parses tool call arguments, sent as JSON text, into objects.

    template_format: what `choose_format` finds in the chat template, if that matters. gpt-oss's has one call per
    message, and reasoning under the name "thinking", where others read "reasoning_content".

    Everything else stays unchanged: `Tokenizer.apply_chat_template` checks the messages' shape. Raises
    `InvalidRequestError` for a part that is not text, and for arguments that are not a JSON object.
    """
    converted = [_converted(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if template_format is None or not all(isinstance(message, dict) for message in converted):
        return converted
    return template_format.syntax.history(converted)


def _converted(message: Any, field: str) -> Any:
    if not isinstance(message, Mapping):
        return message
    converted = dict(message)
    content, calls = converted.get("content"), converted.get("tool_calls")
    if isinstance(content, list):
        converted["content"] = "\n".join(_text(part, f"{field}.content[{i}]") for i, part in enumerate(content))
    if isinstance(calls, list):
        converted["tool_calls"] = [_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif "tool_calls" in converted and calls is None:
        del converted["tool_calls"]  # templates test whether the key exists
    return converted


def _text(part: Any, field: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequestError(
        f"{field}: a part of type {kind!r}; this model reads text: give {{'type': 'text', 'text': ...}}",
        field=field,
        value=repr(part)[:200],
    )


def _call(call: Any, field: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise _bad_arguments(field, function["arguments"], str(error)) from error
    if not isinstance(arguments, dict):
        raise _bad_arguments(field, function["arguments"], f"it is of type {type(arguments).__name__}")
    return {**call, "function": {**function, "arguments": arguments}}


def _bad_arguments(field: str, value: str, why: str) -> InvalidRequestError:
    field = f"{field}.function.arguments"
    return InvalidRequestError(
        f"{field}: the text of a JSON object is needed: {why}", field=field, value=repr(value)[:200]
    )
