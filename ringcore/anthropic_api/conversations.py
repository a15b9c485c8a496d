"""Messages of Anthropic's API: validation, and conversion to those of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringcore.errors import InvalidRequestError

__all__ = ["chat_messages"]

_Message = dict[str, Any]


def chat_messages(system: Any, messages: list[_Message]) -> list[_Message]:
    """The conversation; results of tools become messages of their own. Raises `InvalidRequestError`."""
    converted: list[_Message] = []
    if system is not None:
        converted.append({"role": "system", "content": _texts("system", system)})
    for i, message in enumerate(messages):
        converted += _converted(f"messages[{i}]", message)
    if converted[-1]["role"] == "assistant":
        raise _bad("messages", "the last one is the assistant's, and answers are not continued; end with the user's")
    return converted


def _converted(where: str, message: _Message) -> list[_Message]:
    content = message.get("content")
    match message.get("role"), content:
        case "user" | "assistant" as role, str():
            return [{"role": role, "content": content}]
        case "user", list():
            return _user_messages(where, content)
        case "assistant", list():
            return [_assistant_message(where, content)]
        case "system", _:
            return [{"role": "system", "content": _texts(f"{where}.content", content)}]
        case "user" | "assistant", _:
            raise _bad(f"{where}.content", "give a string, or a list of blocks")
    raise _bad(f"{where}.role", "give 'user', 'assistant' or 'system'")


def _user_messages(where: str, blocks: list[Any]) -> list[_Message]:
    """One message for each result of a tool and for each run of texts, in their order."""
    messages: list[_Message] = []
    for at, block in _typed(where, blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                if not messages or messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": []})
                messages[-1]["content"].append({"type": "text", "text": text})
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _result(at, block)})
            case _:
                raise _bad_block(at, block, "text", "tool_result")
    return messages or [{"role": "user", "content": ""}]


def _result(where: str, block: _Message) -> str:
    """Chat templates have no place for `is_error`: the text says it."""
    content, is_error = block.get("content"), block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise _bad(f"{where}.is_error", "give true or false")
    text = "" if content is None else _texts(f"{where}.content", content)
    return f"Error: {text}" if is_error else text


def _assistant_message(where: str, blocks: list[Any]) -> _Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[_Message] = []
    for at, block in _typed(where, blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)} if name:
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _bad_block(at, block, "text", "thinking", "tool_use")
    message: _Message = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def _texts(where: str, content: Any) -> str:
    """A string, or the blocks of text of a list, each on a line of its own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, "give a string, or a list of blocks of type 'text'")
    texts = []
    for i, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _bad_block(f"{where}[{i}]", block, "text")
    return "\n".join(texts)


def _typed(where: str, blocks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each block with its path."""
    for i, block in enumerate(blocks):
        yield f"{where}.content[{i}]", block


_FORMS = {
    "text": "{'type': 'text', 'text': ...}",
    "thinking": "{'type': 'thinking', 'thinking': ...}",
    "tool_use": "{'type': 'tool_use', 'id': ..., 'name': ..., 'input': {...}}",
    "tool_result": "{'type': 'tool_result', 'tool_use_id': ..., 'content': ...}",
}


def _bad_block(where: str, block: Any, *kinds: str) -> InvalidRequestError:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in kinds:
        return _bad(where, f"give {_FORMS[kind]}")
    named = f"a block of type {kind!r}" if isinstance(kind, str) else "no block"
    return _bad(f"{where}.type", f"{named[:80]}; this model takes here {' or '.join(map(repr, kinds))}")


def _bad(field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {remedy}", field=field)
