"""A conversation in the form that gpt-oss's chat template expects.

The template writes the reasoning of a message from its field `thinking`, drops it where an answer in the final channel
came later, and writes one call of a message, whose tool it takes for that of the results after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["harmony_history"]

Message = dict[str, Any]


def harmony_history(messages: Sequence[Message]) -> list[Message]:
    """Gives each call a message of its own, with its results after it, and reasoning its name.

    messages: of `to_template_messages`, with calls of any shape.
    """
    history: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            history.append(_with_thinking(message))
            continue
        end = position
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        history += _one_by_one(_with_thinking(message), calls, messages[position:end])
        position = end
    return history


def _with_thinking(message: Message) -> Message:
    """With calls the template writes the content as reasoning, and refuses both."""
    if "reasoning_content" not in message:
        return message
    named = dict(message)
    thinking = named.pop("reasoning_content")
    if not thinking:
        return named
    if named.get("tool_calls") and named.get("content"):
        thinking, named["content"] = f"{thinking}\n{named['content']}", ""
    return named | {"thinking": thinking}


def _one_by_one(message: Message, calls: Sequence[Any], results: Sequence[Message]) -> Iterator[Message]:
    """Each call, and the results that have its id; the last call has those without one."""
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    for i, call in enumerate(calls):
        said = message if i == 0 else {"role": "assistant", "content": ""}
        yield said | {"tool_calls": [call]}
        for result in results:
            named = result.get("tool_call_id")
            if i == (ids.index(named) if named in ids else len(calls) - 1):
                yield result
