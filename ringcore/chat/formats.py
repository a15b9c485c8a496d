"""The tool call and reasoning formats by name, and their detection from the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringcore.chat.call_rules import json_call, xml_call
from ringcore.chat.harmony import HarmonySyntax
from ringcore.chat.json_call import JsonCall
from ringcore.chat.reasoning import ReasoningSyntax
from ringcore.chat.syntax import OutputSyntax
from ringcore.chat.tagged import TaggedSyntax
from ringcore.chat.tool_parser import CallSyntax
from ringcore.chat.xml_call import FUNCTION, XmlCall
from ringcore.errors import ConfigError

__all__ = ["FORCED_CALLS_OF_ANY_MODEL", "REASONING_FORMATS", "TOOL_CALL_FORMATS", "ChatFormat", "choose_format"]

_TAGGED_CALLS: dict[str, CallSyntax] = {
    # Qwen2.5, Qwen3, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    "hermes": CallSyntax(JsonCall, json_call("arguments"), openings=("<tool_call>",), closing="</tool_call>"),
    # Llama 3.1 to 3.3: {"name": ..., "parameters": {...}} as the whole output, or after <|python_tag|>
    "llama3_json": CallSyntax(JsonCall, json_call("parameters"), openings=("<|python_tag|>",), bare="{", separator=";"),
    # Qwen3-Coder: <tool_call><function=...><parameter=...>...</parameter></function></tool_call>; the model
    # sometimes omits the opening tag
    "qwen3_coder": CallSyntax(
        XmlCall, xml_call, openings=("<tool_call>",), unopened=(FUNCTION,), closing="</tool_call>"
    ),
}

_TAGGED_REASONING: dict[str, ReasoningSyntax] = {
    # Qwen3: the model writes <think> itself, or the template does
    "qwen3": ReasoningSyntax(thinks_first=False),
    # DeepSeek-R1 and its distillations: reasoning from the first token on, with or without the tag
    "deepseek_r1": ReasoningSyntax(thinks_first=True),
}

# gpt-oss: a format of whole messages, which tells calls and reasoning together
_HARMONY = "harmony"

# Calls as JSON alone: a grammar can hold any model to it, whatever it was trained for.
FORCED_CALLS_OF_ANY_MODEL = "llama3_json"

TOOL_CALL_FORMATS = (*_TAGGED_CALLS, _HARMONY)
REASONING_FORMATS = (*_TAGGED_REASONING, _HARMONY)

# Texts that identify a template of each format; the first format whose marks all occur is chosen.
_HARMONY_MARKS = ("<|start|>assistant", "<|channel|>", "<|message|>")
_TOOL_CALL_MARKS: dict[str, tuple[str, ...]] = {
    _HARMONY: _HARMONY_MARKS,
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": ("<tool_call>", '"arguments"'),
    "llama3_json": ("<|start_header_id|>", '"parameters"', "tool_calls"),
}
_REASONING_MARKS: dict[str, tuple[str, ...]] = {
    _HARMONY: _HARMONY_MARKS,
    "deepseek_r1": ("<｜Assistant｜>", "</think>"),  # noqa: RUF001 (the bars are DeepSeek's)
    "qwen3": ("</think>",),
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats to parse, by name; None for no parsing. The reasoning "harmony" has its own tool calls or None."""

    tool_calls: str | None = None
    reasoning: str | None = None

    @property
    def syntax(self) -> OutputSyntax:
        if self.reasoning == _HARMONY:
            return HarmonySyntax(has_calls=self.tool_calls is not None)
        calls = None if self.tool_calls is None else _TAGGED_CALLS[self.tool_calls]
        reasoning = None if self.reasoning is None else _TAGGED_REASONING[self.reasoning]
        return TaggedSyntax(calls, reasoning)

    @property
    def markers(self) -> frozenset[str]:
        """The texts that a parser of this format must see, even where they are special tokens of the model."""
        return self.syntax.markers

    @property
    def stops(self) -> frozenset[str]:
        """The markers that end an output."""
        return self.syntax.stops


def choose_format(
    chat_template: str | None, tool_call_parser: str | None = "auto", reasoning_parser: str | None = "auto"
) -> ChatFormat:
    """The format of a model with this template.

    "auto" detects it from the template, which shows the model the syntax of its calls; the architecture does not
    determine it, since models of one architecture are trained for different formats; beside "harmony" it is that. None
    disables parsing.

    Raises `ConfigError` for an unknown name, and for two that do not go together.
    """
    if _HARMONY in (tool_call_parser, reasoning_parser):
        tool_call_parser, reasoning_parser = (
            _HARMONY if name == "auto" else name for name in (tool_call_parser, reasoning_parser)
        )
    calls = _choose("tool_call_parser", tool_call_parser, TOOL_CALL_FORMATS, _TOOL_CALL_MARKS, chat_template)
    reasoning = _choose("reasoning_parser", reasoning_parser, REASONING_FORMATS, _REASONING_MARKS, chat_template)
    if (reasoning == _HARMONY and calls not in (_HARMONY, None)) or (calls == _HARMONY and reasoning != _HARMONY):
        raise ConfigError(
            f"tool_call_parser={calls!r} with reasoning_parser={reasoning!r}: {_HARMONY!r} is the format of whole "
            "messages, with reasoning and calls in them; give it for both, or for neither",
            option="tool_call_parser",
            value=calls,
        )
    return ChatFormat(calls, reasoning)


def _choose(
    option: str,
    name: str | None,
    formats: Sequence[str],
    marks: Mapping[str, tuple[str, ...]],
    chat_template: str | None,
) -> str | None:
    if name is None or name in formats:
        return name
    if name != "auto":
        valid = ", ".join(map(repr, formats))
        raise ConfigError(
            f"{option}={name!r}: no such format; give 'auto', None or one of {valid}", option=option, value=name
        )
    template = (chat_template or "").replace('\\"', '"')  # inside a string literal of the template
    return next((one for one, words in marks.items() if all(word in template for word in words)), None)
