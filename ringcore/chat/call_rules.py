"""Grammar rules (llguidance's Lark) for a call of one tool, in the syntax that the parsers read.

A rule covers the text between the call's markers; JSON is formatted as templates write it, `{"a": 1, "b": 2}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ringcore.chat.tools import ToolSchemas
from ringcore.chat.xml_call import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from ringcore.errors import InvalidRequestError
from ringcore.grammars.json_schemas import LLGUIDANCE_ONE_LINE, LLGUIDANCE_OPTIONS, normalized_schema

__all__ = [
    "SHARED_RULES",
    "CallRule",
    "arguments_object",
    "call_rule",
    "json_call",
    "json_value",
    "literal",
    "xml_call",
]

# A tool's function {"name", "parameters"} -> the rule of a call.
CallRule = Callable[[Mapping[str, Any]], str]

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_KEY = re.compile(r"[^<>\n]+")
# Referenced by calls: the text of an argument, up to the end tag that the parser looks for.
SHARED_RULES = rf"""xml_text: xml_text_to_end "\n"
xml_text_to_end[lazy]: /(.|\n)*{PARAMETER_END.replace("/", chr(92) + "/")}/"""


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any], *, is_fixed: bool = False) -> str:
    """A JSON value of this schema, with whitespace as in `LLGUIDANCE_OPTIONS`, or exactly as `json.dumps` writes it.

    Raises ValueError that names what cannot be enforced.
    """
    options = dict(LLGUIDANCE_ONE_LINE if is_fixed else LLGUIDANCE_OPTIONS)
    return f"%json {json.dumps({**normalized_schema(schema), 'x-guidance': options})}"


def call_rule(write: CallRule, function: Mapping[str, Any]) -> str:
    """The rule of a call. Raises `InvalidRequestError` for parameters that no grammar can enforce."""
    try:
        return write(function)
    except ValueError as error:
        raise InvalidRequestError(
            f"tools: the parameters of {function['name']!r}: {error}; change them, or let the model call as it likes",
            field="tools",
            value=None,
        ) from error


def arguments_object(function: Mapping[str, Any], *, is_fixed: bool = False) -> str:
    """The arguments of a call as a JSON object; see `json_value`."""
    parameters = function.get("parameters")
    # A schema without a type allows any value, but arguments are an object.
    schema = _NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}
    return json_value(schema, is_fixed=is_fixed)


def json_call(arguments: str) -> CallRule:
    """{"name": "f", "<arguments>": {...}}"""
    return partial(_json_call, arguments)


def _json_call(key: str, function: Mapping[str, Any]) -> str:
    begin = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f"{literal(begin)} {arguments_object(function, is_fixed=True)} {literal('}')}"


def xml_call(function: Mapping[str, Any]) -> str:
    """<function=f>, and each argument between <parameter=key> and </parameter>, in the schema's order.

    Of a string's schema only `enum` and `const` are enforced. Raises `InvalidRequestError` for a key that this syntax
    cannot express.
    """
    schema = function.get("parameters") or {}
    required = schema.get("required", [])
    types = ToolSchemas([function])
    parts = [literal(f"{FUNCTION}{function['name']}>\n")]
    for key, of_value in schema.get("properties", {}).items():
        if _KEY.fullmatch(key) is None or key != key.strip():
            raise InvalidRequestError(
                f"tools: the parameter {key!r} of {function['name']!r} has no form in a call of this model's; give "
                "it a name without <, > and line breaks, and without blanks at its ends",
                field="tools",
                value=key,
            )
        declared = types.types_of(function["name"], key)
        value = _xml_value(of_value, schema.get("$defs"), is_text=not declared or "string" in declared)
        argument = f"({literal(f'{PARAMETER}{key}>{chr(10)}')} {value})"
        parts.append(argument if key in required else f"{argument}?")
    return " ".join([*parts, literal(FUNCTION_END)])


def _xml_value(schema: Any, definitions: Any, *, is_text: bool) -> str:
    end = literal(f"\n{PARAMETER_END}\n")
    if not is_text:
        with_definitions = schema if definitions is None else {**schema, "$defs": definitions}
        return f"{json_value(with_definitions, is_fixed=True)} {end}"
    known = schema if isinstance(schema, dict) else {}
    texts = [known["const"]] if "const" in known else known.get("enum", [])
    if texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(literal(text) for text in texts)}) {end}"
    return "xml_text"
