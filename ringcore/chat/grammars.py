"""The grammar of an answer: tool calls, text of a given form, and reasoning before it.

    start:  reasoning?  ( text | call (separator call)* )

The grammar is in llguidance's Lark. A request for a form of text only, of a model without reasoning, uses its own
specification unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from ringcore.chat.call_rules import SHARED_RULES, json_value, literal
from ringcore.chat.formats import REASONING_FORMATS, TOOL_CALL_FORMATS, ChatFormat
from ringcore.chat.reasoning import CLOSE, OPEN, reasoning_of_prompt
from ringcore.chat.tool_parser import CallSyntax
from ringcore.errors import InvalidRequestError
from ringcore.grammars.regular_expressions import fullmatch_regex, write_regex
from ringcore.params.structured_outputs import StructuredOutputsParams, spec_error

__all__ = ["answer_grammar"]

_HEADER = "%llguidance {}"


def answer_grammar(
    chat_format: ChatFormat,
    *,
    text: StructuredOutputsParams | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    must_call: bool = False,
    is_parallel: bool = True,
    prompt_end: str = "",
    marker_ids: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """The structured outputs that constrain a completion to the request; None where nothing is constrained.

    text: the form of a text answer. With tools, an answer has that form or is calls; a grammar of the client is for
        the whole completion, including reasoning and calls.
    tools: the callable tools, in OpenAI's format. must_call: only calls of these, at least one. is_parallel: more
        calls may follow the first.
    prompt_end: as for `ChatParser`: reasoning may start or end there.
    marker_ids: the token ids of the format's single-token markers. Both such a token and its text spelled in other
        tokens are accepted: whether a grammar sees a special token as text depends on its tokenizer.

    Raises `InvalidRequestError` for tools that cannot be called in this format, and for what no grammar can enforce.
    """
    if text is None and not must_call:
        return None
    assert not (must_call and text), "must_call excludes a text form"
    reasoning = _reasoning(chat_format, prompt_end)
    if text is not None and (text.kind == "grammar" or not (reasoning or tools)):
        return text
    answers = [_text(text)] if text is not None else []
    marks = _Marks(marker_ids or {})
    rules = []
    if tools:
        assert chat_format.tool_calls is not None, "tools need a tool call format"
        syntax = TOOL_CALL_FORMATS[chat_format.tool_calls]
        answers.append("calls")
        rules += _calls(syntax, tools, marks, is_parallel=is_parallel)
    start = " | ".join(answers)
    if reasoning:
        start = f"{reasoning} ({start})"
        rules += _reasoning_rules(marks)
    return StructuredOutputsParams(grammar="\n".join([_HEADER, f"start: {start}", *rules, ""]))


class _Marks:
    """The markers in Lark syntax."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def token(self, marker: str) -> str | None:
        return f"<[{self._ids[marker]}]>" if marker in self._ids else None

    def either(self, marker: str) -> str:
        token = self.token(marker)
        return literal(marker) if token is None else f"({token} | {literal(marker)})"


def _reasoning(chat_format: ChatFormat, prompt_end: str) -> str:
    """The rule before the answer; "" for none."""
    if chat_format.reasoning is None:
        return ""
    match reasoning_of_prompt(prompt_end):
        case "closed":
            return ""
        case "open":
            return "think_rest"
        case "none":
            thinks_first = REASONING_FORMATS[chat_format.reasoning].thinks_first
            return "think_open? think_rest" if thinks_first else "(think_open think_rest)?"
        case prompt:
            assert_never(prompt)


def _reasoning_rules(marks: _Marks) -> list[str]:
    token = marks.token(CLOSE)
    rest = "think_text" if token is None else f"(THOUGHT {token} | think_text)"
    return [
        f"think_open: {marks.either(OPEN)}",
        rf"think_rest: {rest} /\n{{0,2}}/",
        rf"think_text[lazy]: /(.|\n)*{CLOSE.replace('/', chr(92) + '/')}/",
        *([] if token is None else [r"THOUGHT: /(.|\n)*/"]),
    ]


def _calls(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], marks: _Marks, *, is_parallel: bool) -> list[str]:
    begin = end = ""
    if syntax.closing:  # in tags, which templates write on their own lines
        begin = f"{marks.either(syntax.openings[0])} {literal(chr(10))} "
        end = f" {literal(chr(10))} {marks.either(syntax.closing)}"
    bodies = [_call_body(syntax, tool["function"]) for tool in tools]
    return [
        f"calls: call ({literal(syntax.separator + chr(10))} call)*" if is_parallel else "calls: call",
        f"call: {begin}call_body{end}",
        f"call_body: {' | '.join(f'call_{i}' for i in range(len(bodies)))}",
        *(f"call_{i}: {body}" for i, body in enumerate(bodies)),
        *([SHARED_RULES] if any("xml_text" in body for body in bodies) else []),
    ]


def _call_body(syntax: CallSyntax, function: Mapping[str, Any]) -> str:
    try:
        return syntax.write(function)
    except ValueError as error:
        raise InvalidRequestError(
            f"tools: the parameters of {function['name']!r}: {error}; change them, or let the model call as it likes",
            field="tools",
            value=None,
        ) from error


def _text(text: StructuredOutputsParams) -> str:
    try:
        return _text_rule(text)
    except ValueError as error:
        raise spec_error(text, str(error)) from error


def _text_rule(text: StructuredOutputsParams) -> str:
    match text.kind:
        case "json":
            return json_value(json.loads(text.json) if isinstance(text.json, str) else text.json or {})
        case "json_object":
            return json_value({"type": "object"})
        case "regex":
            assert text.regex is not None
            return f"/{write_regex(fullmatch_regex(text.regex))}/"
        case "choice":
            return " | ".join(literal(choice) for choice in text.choice or ())
        case "grammar":
            raise AssertionError("a grammar is for the whole completion")
        case kind:
            assert_never(kind)
