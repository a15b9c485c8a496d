"""Tools and calls as models write them, and a service's answers as the official client reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import openai
import pytest
from running_service import DEADLINE_S

ARGUMENTS = {"city": "Zürich", "days": 3}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = "<tool_call>\n" + json.dumps({"name": "get_weather", "arguments": ARGUMENTS}) + "\n</tool_call>"
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": ]}}\n</tool_call>'
LLAMA_CALL = json.dumps({"name": "get_weather", "parameters": ARGUMENTS})


def client_of(service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


@dataclass
class Got:
    """One choice, whole or added up from its chunks as a client does it."""

    content: str | None = None
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)

    def add_chunk(self, choice) -> None:
        delta = choice.delta
        if delta.content:
            self.content = (self.content or "") + delta.content
        self.reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(self.calls):
                assert call.type == "function"
                assert call.function.arguments == ""
                self.calls.append((call.function.name, ""))
                self.ids.append(call.id)
            else:
                assert call.id is call.function.name is call.type is None
                name, arguments = self.calls[call.index]
                self.calls[call.index] = (name, arguments + call.function.arguments)
        self._add_end(choice)

    def add_message(self, choice) -> None:
        message = choice.message
        self.content, self.reasoning = message.content, getattr(message, "reasoning_content", "")
        for call in message.tool_calls or []:
            assert call.type == "function"
            self.calls.append((call.function.name, call.function.arguments))
            self.ids.append(call.id)
        self._add_end(choice)

    def _add_end(self, choice) -> None:
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.tokens += [one.token for one in choice.logprobs.content] if choice.logprobs else []

    @property
    def read_calls(self) -> list[tuple[str, dict]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def ask_all(service, say: str, *, stream: bool = False, messages=(), **options) -> list[Got]:
    choices = [Got() for _ in range(options.get("n", 1))]
    with client_of(service) as client:
        answer = client.chat.completions.create(
            model=service.service.model_names[0],
            messages=[{"role": "user", "content": say}, *messages],
            stream=stream,
            **options,
        )
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                got = choices[choice.index]
                got.add_chunk(choice) if stream else got.add_message(choice)
    return choices


def ask(service, say: str, **options) -> Got:
    (got,) = ask_all(service, say, **options)
    return got


streaming = pytest.mark.parametrize("stream", [False, True])
