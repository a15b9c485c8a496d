"""Normalizes JSON schemas so that every grammar library reads them alike; refuses what none can enforce.

Patterns are rewritten (`ringcore.grammars.regular_expressions`), formats become patterns, and this module alone defines
the whitespace that JSON may contain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ringcore.grammars.json_formats import FORMAT_PATTERNS
from ringcore.grammars.regular_expressions import search_regex, write_regex

__all__ = ["BY_NAME", "LISTS", "LLGUIDANCE_ONE_LINE", "LLGUIDANCE_OPTIONS", "MAX_INDENT", "SINGLE", "normalized_schema"]

MAX_INDENT = 32  # spaces of a line's indent, or a quarter as many tabs

# Keywords whose values are schemas: by name, in a list, or one.
BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems"))
SINGLE = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
        *("not", "if", "then", "else", "contains", "propertyNames"),
    )
)

# Overrides of a schema's own "x-guidance" options, which must not disable a constraint.
_STRICT: Mapping[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    # Without \u: an escaped key would be taken for a different key.
    "json_allowed_escapes": '"\\bfnrt',
}
LLGUIDANCE_OPTIONS: Mapping[str, Any] = {
    **_STRICT,
    "whitespace_flexible": True,
    "whitespace_pattern": rf" |\n(?: {{0,{MAX_INDENT}}}|\t{{0,{MAX_INDENT // 4}}})",
}
# JSON exactly as `json.dumps` writes it. No whitespace_pattern: it would apply whatever `whitespace_flexible` says.
LLGUIDANCE_ONE_LINE: Mapping[str, Any] = {
    **_STRICT,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_WRITABLE_CONTROLS = frozenset("\b\f\n\r\t")

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_EXACT = 2**53  # libraries read integers as float64
_EARLIER_DRAFTS = ("extends", "disallow", "divisibleBy")  # which libraries ignore


def normalized_schema(schema: Any) -> Any:
    """The schema in normal form. Raises ValueError that names a keyword which no library can enforce."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema {schema!r} is neither an object nor true or false")
    _check(schema)
    result = dict(schema)
    for name in BY_NAME & result.keys():
        if isinstance(result[name], Mapping):
            result[name] = {key: normalized_schema(inner) for key, inner in result[name].items()}
    for name in (LISTS | SINGLE) & result.keys():
        inner = result[name]
        result[name] = list(map(normalized_schema, inner)) if isinstance(inner, list) else normalized_schema(inner)
    if isinstance(result.get("patternProperties"), dict):
        result["patternProperties"] = {_pattern(key): inner for key, inner in result["patternProperties"].items()}
    if "pattern" in result:
        result["pattern"] = _pattern(result["pattern"])
    if result.get("uniqueItems") is False:
        del result["uniqueItems"]
    return _with_format_as_patterns(result)


def _pattern(pattern: str) -> str:
    return f"^(?:{write_regex(search_regex(pattern))})$"


def _with_format_as_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    patterns = FORMAT_PATTERNS.get(schema.get("format", ""), ())
    if not patterns:
        return schema
    del schema["format"]
    left = [_pattern(pattern) for pattern in patterns]
    if "pattern" not in schema:
        schema["pattern"] = left.pop(0)
    if left:
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": pattern} for pattern in left)]
    return schema


# ---------------------------------------------------------------------------------------------------------------
# What no library can enforce.


def _check(schema: Mapping[str, Any]) -> None:
    for name in _EARLIER_DRAFTS:
        if name in schema:
            raise ValueError(f"{name!r} is of an earlier draft of JSON Schema, and is not supported")
    for name in ("pattern", "format", "$ref"):
        if not isinstance(schema.get(name, ""), str):
            raise ValueError(f"{name} {schema[name]!r} is no string")
    for name in _BOUNDS:
        if name in schema:
            _check_bound(name, schema[name])
    for name in ("enum", "const"):
        for value in _values(schema.get(name)):
            _check_value(name, value)
    if "$ref" in schema:
        _check_reference(schema["$ref"])
    # A duplicate name in a text is one property; names that are not in the schema may be duplicated.
    names = schema.get("required")
    num_required = len({name for name in names if isinstance(name, str)}) if isinstance(names, list) else 0
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > num_required + 1:
        raise ValueError(f"minProperties {least} cannot be enforced where {num_required} properties are required")


def _check_bound(name: str, bound: Any) -> None:
    if isinstance(bound, int | float) and not abs(bound) < _MAX_EXACT:
        raise ValueError(f"{name} {bound} cannot be enforced exactly; give a number within 2^53")


def _values(value: Any) -> Iterator[Any]:
    """The value and all values nested in it."""
    yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _values(one)


def _check_value(name: str, value: Any) -> None:
    match value:
        case str():
            if unwritable := [c for c in value if (c < " " and c not in _WRITABLE_CONTROLS) or c == "\x7f"]:
                raise ValueError(f"{name} with the control character {unwritable[0]!r} is not supported")
        case int() if abs(value) > _MAX_EXACT:
            raise ValueError(f"{name} {value} cannot be enforced exactly; give an integer within 2^53")
        case float() if not math.isfinite(value):
            raise ValueError(f"{name} {value} is no number of JSON")


def _check_reference(reference: str) -> None:
    """A $ref must point to a subschema, by a path of keywords that contain schemas: only those are normalized."""
    root, *steps = reference.split("/")
    is_schema = root == "#"
    while steps and is_schema:
        name, *steps = steps
        if name in BY_NAME or name in LISTS:
            is_schema = bool(steps)
            steps = steps[1:]
        else:
            is_schema = name in SINGLE
    if not is_schema:
        raise ValueError(f"the $ref {reference!r} points to no schema within this one, such as '#/$defs/name'")
