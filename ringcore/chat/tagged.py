"""Outputs whose reasoning and calls are marked within one text: `<think>...</think>`, then an answer with calls in it.

Their grammar is

    start:  reasoning?  ( text | call (separator call)* )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from ringcore.chat.call_rules import SHARED_RULES, call_rule, literal
from ringcore.chat.events import ChatEvent, ReasoningDelta
from ringcore.chat.reasoning import CLOSE, OPEN, ReasoningSplitter, ReasoningSyntax, reasoning_of_prompt
from ringcore.chat.syntax import AnswerForm, Marks, OutputSyntax
from ringcore.chat.text_rules import text_rule
from ringcore.chat.tool_parser import CallSyntax, ToolCallParser
from ringcore.chat.tools import ToolSchemas

__all__ = ["TaggedSyntax"]


@dataclass(frozen=True, slots=True)
class TaggedSyntax(OutputSyntax):
    """None: text of that kind is not told from the rest."""

    calls: CallSyntax | None
    reasoning: ReasoningSyntax | None

    @property
    def markers(self) -> frozenset[str]:
        calls = self.calls
        of_calls = () if calls is None else (*calls.openings, *calls.unopened, calls.closing)
        of_reasoning = () if self.reasoning is None else (OPEN, CLOSE)
        return frozenset((*of_calls, *of_reasoning)) - {""}

    def parser(self, tools: ToolSchemas, prompt_end: str, new_id: Callable[[], str]) -> TaggedParser:
        splitter = ReasoningSplitter(self.reasoning, reasoning_of_prompt(prompt_end))
        return TaggedParser(splitter, ToolCallParser(self.calls, tools, new_id))

    def rules(self, form: AnswerForm) -> list[str] | None:
        reasoning = self._reasoning(form.prompt_end)
        if not (reasoning or form.functions):
            return None
        answers = [] if form.text is None else [text_rule(form.text)]
        rules = []
        if form.functions:
            assert self.calls is not None, "tools need a tool call format"
            answers.append("calls")
            rules += _call_rules(self.calls, form)
        start = " | ".join(answers)
        if reasoning:
            start = f"{reasoning} ({start})"
            rules += _reasoning_rules(form.marks)
        return [f"start: {start}", *rules]

    def _reasoning(self, prompt_end: str) -> str:
        """The rule before the answer; "" for none."""
        if self.reasoning is None:
            return ""
        match reasoning_of_prompt(prompt_end):
            case "closed":
                return ""
            case "open":
                return "think_rest"
            case "none":
                return "think_open? think_rest" if self.reasoning.thinks_first else "(think_open think_rest)?"
            case prompt:
                assert_never(prompt)


def _reasoning_rules(marks: Marks) -> list[str]:
    return [
        f"think_open: {marks.either(OPEN)}",
        r"think_rest: thought /\n{0,2}/",
        *marks.text_up_to(CLOSE, "thought"),
    ]


def _call_rules(syntax: CallSyntax, form: AnswerForm) -> list[str]:
    begin = end = ""
    if syntax.closing:  # in tags, which templates write on their own lines
        begin = f"{form.marks.either(syntax.openings[0])} {literal(chr(10))} "
        end = f" {literal(chr(10))} {form.marks.either(syntax.closing)}"
    bodies = [call_rule(syntax.write, function) for function in form.functions]
    return [
        f"calls: call ({literal(syntax.separator + chr(10))} call)*" if form.is_parallel else "calls: call",
        f"call: {begin}call_body{end}",
        f"call_body: {' | '.join(f'call_{i}' for i in range(len(bodies)))}",
        *(f"call_{i}: {body}" for i, body in enumerate(bodies)),
        *([SHARED_RULES] if any("xml_text" in body for body in bodies) else []),
    ]


class TaggedParser:
    """`OutputParser`: what is not reasoning goes through the parser of calls."""

    def __init__(self, reasoning: ReasoningSplitter, content: ToolCallParser) -> None:
        self._reasoning, self._content = reasoning, content
        self._has_content = False

    def feed(self, text: str) -> list[ChatEvent]:
        return self._events(*self._reasoning.feed(text))

    def finish(self) -> list[ChatEvent]:
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
