"""The grammar of a completion: a JSON schema, a regular expression, a choice or a context-free grammar."""

from __future__ import annotations

import json as json_text
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from ringcore.errors import InvalidRequestError
from ringcore.params.field_checks import bad_field, check_list, check_plain_data, check_text

__all__ = ["StructuredOutputsKind", "StructuredOutputsParams", "spec_error"]

StructuredOutputsKind = Literal["json", "json_object", "regex", "choice", "grammar"]

MAX_SPEC_CHARS = 65_536
MAX_NESTING = 64
MAX_CHOICES = 1024
_MAX_ERROR_CHARS = 1000
# Text whose brackets do not group: escapes, character sets, quoted strings. Linear in the text.
_NO_GROUPS = {
    "regex": re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?", re.DOTALL),
    "grammar": re.compile(r'\\.|"(?:\\.|[^"\\\n])*"?'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Constrains a completion by exactly one of these fields. `max_tokens` may truncate the completion.

    json: a JSON schema, as a dict or as its text; the completion is a JSON value that it allows. Its patterns are
        ECMA-262's, and its formats are enforced.
    json_object: True: the completion is any JSON object.
    regex: a regular expression for the whole completion, as Python's `re` reads it with `re.ASCII`: \\d, \\w, \\s and
        (?i) are ASCII's, and . matches no line feed. With llguidance \\p{...} too.
    choice: the completion is one of these strings.
    grammar: the completion is a sentence of this context-free grammar, in llguidance's Lark syntax or GBNF.

    Whitespace between JSON tokens is nothing, one space, or one line feed and an indent of at most 32 spaces or 8 tabs,
    so that no model generates whitespace forever. What a library cannot enforce exactly is refused by name: lookaround
    and back-references in a regular expression, schema keywords that the library would ignore.

    A specification has at most 65,536 characters in all, 64 levels of nested brackets, and 1,024 choices.
    Raises `InvalidRequestError` naming field, value and remedy. An error that only the compiler finds is reported as
    the error of the request.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise bad_field("structured_outputs", ", ".join(given) or None, f"give exactly one of {names}")
        match self.kind:
            case "json":
                _check_schema(self.json)
            case "json_object":
                if self.json_object is not True:
                    raise _bad("json_object", self.json_object, "give True, or leave it out")
            case "choice":
                _check_choices(self.choice)
            case "regex" | "grammar" as kind:
                text = getattr(self, kind)
                check_text(f"structured_outputs.{kind}", text, MAX_SPEC_CHARS, f"a {kind}")
                if _nesting(text, kind) > MAX_NESTING:
                    raise _bad(kind, text, f"brackets are nested more than {MAX_NESTING} deep; make it flatter")

    @property
    def kind(self) -> StructuredOutputsKind:
        """The name of the given field."""
        return next(cast(StructuredOutputsKind, f.name) for f in fields(self) if getattr(self, f.name) is not None)


def spec_error(spec: StructuredOutputsParams, why: str) -> InvalidRequestError:
    """The error of a well-formed specification that cannot be compiled or enforced."""
    field, why = f"structured_outputs.{spec.kind}", " ".join(why.split())
    if len(why) > _MAX_ERROR_CHARS:
        why = f"{why[:_MAX_ERROR_CHARS]}..."
    return InvalidRequestError(f"{field}: {why}; change it, or leave structured_outputs out", field=field, value=None)


def _bad(field: str, value: object, remedy: str) -> Exception:
    return bad_field(f"structured_outputs.{field}", value, remedy)


def _check_schema(schema: object) -> None:
    if isinstance(schema, str):
        check_text("structured_outputs.json", schema, MAX_SPEC_CHARS, "a JSON schema")
        try:
            value = json_text.loads(schema, parse_constant=_refuse_constant)
        except RecursionError:
            raise _bad("json", schema, f"it is nested more than {MAX_NESTING} deep; make it flatter") from None
        except ValueError as error:
            raise _bad("json", schema, f"it is no JSON: {error}; give a JSON schema") from None
    else:
        value = schema
    if not isinstance(value, dict):
        raise _bad("json", schema, "give a JSON schema, an object")
    check_plain_data("structured_outputs.json", value, max_size=MAX_SPEC_CHARS, max_depth=MAX_NESTING)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_choices(choices: object) -> None:
    left = MAX_SPEC_CHARS
    for choice in check_list("structured_outputs.choice", choices, MAX_CHOICES, "each is a string"):
        check_text("structured_outputs.choice", choice, MAX_SPEC_CHARS, "a choice")
        left -= len(choice)
    if left < 0:
        raise _bad("choice", choices, f"the choices have more than {MAX_SPEC_CHARS} characters; give fewer or shorter")


def _nesting(text: str, kind: str) -> int:
    """The nesting depth of grouping brackets."""
    depth = deepest = 0
    for char in _NO_GROUPS[kind].sub("", text):
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest
