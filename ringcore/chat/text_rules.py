"""Grammar rules (llguidance's Lark) for a text answer of a given form."""

from __future__ import annotations

import json
from typing import assert_never

from ringcore.chat.call_rules import json_value, literal
from ringcore.grammars.regular_expressions import fullmatch_regex, write_regex
from ringcore.params.structured_outputs import StructuredOutputsParams, spec_error

__all__ = ["text_rule"]


def text_rule(text: StructuredOutputsParams) -> str:
    """Raises `InvalidRequestError` for what no grammar can enforce."""
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
