"""Harmony, gpt-oss's format: an output is messages, each with a header that names its channel and its recipient.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary<|message|>content before calls, for the user<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with the first message's `<|start|>assistant`. The recipient may also stand before the channel. A model
stops at `<|call|>` and `<|return|>`, so an output has at most one call. Source: openai/harmony, docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringcore.chat.call_rules import arguments_object, call_rule, literal
from ringcore.chat.harmony_header import CALL, CHANNEL, CHANNELS, CONSTRAIN, END, MARKERS, MESSAGE, RETURN, START
from ringcore.chat.harmony_history import harmony_history
from ringcore.chat.harmony_parser import HarmonyParser
from ringcore.chat.reasoning import PromptReasoning
from ringcore.chat.syntax import AnswerForm, Marks, OutputSyntax
from ringcore.chat.text_rules import text_rule
from ringcore.chat.tools import ToolSchemas

__all__ = ["HarmonySyntax"]

_JSON_FORMS = ("json", "json_object")


@dataclass(frozen=True, slots=True)
class HarmonySyntax(OutputSyntax):
    """has_calls: whether calls are parsed; without, a message to a function is content, as the model wrote it.

    The grammar of an output is

        start:  (analysis message, start of the next)*  ( final message of the text's form | call )
    """

    has_calls: bool

    @property
    def markers(self) -> frozenset[str]:
        return MARKERS

    @property
    def stops(self) -> frozenset[str]:
        return frozenset((CALL, RETURN))

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return harmony_history(messages)

    def parser(self, tools: ToolSchemas, prompt_end: str, new_id: Callable[[], str]) -> HarmonyParser:
        return HarmonyParser(tools if self.has_calls else ToolSchemas([]), _message_of_prompt(prompt_end), new_id)

    def rules(self, form: AnswerForm) -> list[str]:
        assert self.has_calls or not form.functions, "tools need a tool call format"
        text = "" if form.text is None else f"({text_rule(form.text)})"
        has_type = form.text is not None and form.text.kind in _JSON_FORMS
        answers = [f"final_header{' type?' if has_type else ''} message {text}"] if text else []
        answers += [f"call_{i}" for i in range(len(form.functions))]
        start = f"analysis* ({' | '.join(answers)})"
        match _message_of_prompt(form.prompt_end):
            case "open":
                start = f"thought next {start}"
            case "closed":
                rest = f"end next {start}"
                start = f"{text} | {rest}" if text else rest
        return [
            f"start: {start}",
            "analysis: analysis_header message thought next",
            *(f"call_{i}: {call_rule(_call, function)}" for i, function in enumerate(form.functions)),
            *_shared_rules(form.marks),
        ]


def _message_of_prompt(prompt_end: str) -> PromptReasoning:
    """ "open": the template has written the header of a message of reasoning; "closed": that of an answer."""
    for channel in CHANNELS:
        if prompt_end.rstrip().endswith(f"{CHANNEL}{channel}{MESSAGE}"):
            return "open" if channel == "analysis" else "closed"
    return "none"


def _call(function: Mapping[str, Any]) -> str:
    recipient = f"to=functions.{function['name']}"
    after_channel = f"channel {literal(f'commentary {recipient}')}"
    before_channel = f"{literal(f' {recipient}')} channel {literal('commentary')}"
    return f"({after_channel} | {before_channel}) type? message {arguments_object(function)}"


def _shared_rules(marks: Marks) -> list[str]:
    return [
        f"analysis_header: channel {literal('analysis')}",
        f"final_header: channel {literal('final')}",
        f"type: {literal(' json')} | {literal(' ')}? {marks.either(CONSTRAIN)} {literal('json')}",
        f"channel: {marks.either(CHANNEL)}",
        f"message: {marks.either(MESSAGE)}",
        f"end: {marks.either(END)}",
        f"next: {marks.either(START)} {literal('assistant')}",
        *marks.text_up_to(END, "thought"),
    ]
