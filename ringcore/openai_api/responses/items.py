"""Items of a conversation: validation, and conversion to the messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Any

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.responses.input_items import listed

__all__ = ["ItemMessages"]

_Message = dict[str, Any]


class ItemMessages:
    """Makes messages of items.

    The reasoning, texts and calls of the assistant's turn are one message, as chat templates expect; reasoning begins
    a new one. Messages hold texts alone.

    stored_item: the output item of an id that a field refers to. items: those that were added, as they are stored,
    by their ids; in place of a reference the item itself.
    """

    def __init__(self, stored_item: Callable[[str, str], dict[str, Any]]) -> None:
        self.messages: list[_Message] = []
        self.items: dict[str, dict[str, Any]] = {}
        self._stored_item = stored_item
        self._referenced = set[str]()

    def instructed(self, instructions: str | None) -> list[_Message]:
        """After these instructions, which are one message with the system messages at the beginning."""
        texts = [] if instructions is None else [instructions]
        others = list(dropwhile(lambda message: message["role"] == "system", self.messages))
        texts += [message["content"] for message in self.messages[: len(self.messages) - len(others)]]
        return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others

    def add(self, where: str, items: Sequence[dict[str, Any]]) -> None:
        """where: the client's field. Raises `InvalidRequestError`."""
        for i, item in enumerate(items):
            self._add(f"{where}[{i}]", item)

    def _add(self, where: str, item: dict[str, Any]) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(where, item)
            case "function_call":
                self._call(where, item)
            case "function_call_output":
                call_id = _string(where, item, "call_id")
                text = _text(f"{where}.output", item.get("output"), "input_text")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case "reasoning":
                self._reasoning(where, item)
            case "item_reference":
                self._reference(where, item)
                return
            case kind:
                served = "'message', 'function_call', 'function_call_output', 'reasoning' or 'item_reference'"
                raise _bad(f"{where}.type", f"items of type {str(kind)[:80]!r} are not served here; give {served}")
        kept = listed(item, self.items)
        self.items[kept["id"]] = kept

    def _message(self, where: str, item: dict[str, Any]) -> None:
        content = item.get("content")
        match item.get("role"):
            case "user":
                self.messages.append({"role": "user", "content": _text(f"{where}.content", content, "input_text")})
            case "system" | "developer":  # few templates know developers
                self.messages.append({"role": "system", "content": _text(f"{where}.content", content, "input_text")})
            case "assistant":
                text = _text(f"{where}.content", content, "output_text")
                message = self._assistant()
                message["content"] = "\n".join(filter(None, (message["content"], text)))
            case _:
                raise _bad(f"{where}.role", "give 'user', 'assistant', 'system' or 'developer'")

    def _call(self, where: str, item: dict[str, Any]) -> None:
        call_id, name = _string(where, item, "call_id"), _string(where, item, "name")
        if not name:
            raise _bad(f"{where}.name", "give the name of a function")
        arguments = _string(where, item, "arguments") or "{}"
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise _bad(f"{where}.arguments", "give the text of a JSON object")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _reasoning(self, where: str, item: dict[str, Any]) -> None:
        """Reasoning that another service has encrypted says nothing here."""
        said = item.get("content") or item.get("summary") or []
        kinds = ("reasoning_text", "summary_text")
        text = _text(f"{where}.content", said, *kinds)
        if text:
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})

    def _reference(self, where: str, item: dict[str, Any]) -> None:
        item_id = _string(where, item, "id")
        if item_id in self._referenced:  # the input would be larger than the store that has the items
            raise _bad(f"{where}.id", "the item is part of the input already; refer to it once")
        self._referenced.add(item_id)
        self._add(where, self._stored_item(item_id, f"{where}.id"))

    def _assistant(self) -> _Message:
        """The message of the assistant's turn."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _text(where: str, content: Any, *kinds: str) -> str:
    """A string, or the texts of parts of these types, each on a line of its own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f"give a string, or a list of parts of type {kinds[0]!r}")
    texts = []
    for i, part in enumerate(content):
        match part:
            case {"type": kind, "text": str(text)} if kind in kinds:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else None
                form = f"{{'type': {kinds[0]!r}, 'text': ...}}"
                raise _bad(f"{where}[{i}]", f"a part of type {str(kind)[:80]!r}; this model takes here {form}")
    return "\n".join(texts)


def _string(where: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _bad(f"{where}.{name}", "give a string")
    return value


def _bad(field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {remedy}", field=field)
