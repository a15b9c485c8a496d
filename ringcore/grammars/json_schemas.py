"""A JSON schema in words that every library of grammars reads alike, or an error that names what none can keep.

Patterns are written anew (`ringcore.grammars.regular_expressions`), formats become patterns, and where JSON may have
whitespace is defined here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ringcore.grammars.json_formats import FORMAT_PATTERNS
from ringcore.grammars.regular_expressions import search_regex, write_regex

__all__ = ["BY_NAME", "LISTS", "LLGUIDANCE_ONE_LINE", "LLGUIDANCE_OPTIONS", "MAX_INDENT", "SINGLE", "normalized_schema"]

MAX_INDENT = 32  # spaces at the beginning of a line, or a quarter as many tabs

# Keywords whose values are schemas: by name, in a list, or one.
BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems"))
SINGLE = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
        *("not", "if", "then", "else", "contains", "propertyNames"),
    )
)

# What a schema says of itself in "x-guidance" must not turn a constraint off: these are laid over it.
_STRICT: Mapping[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    # Without \u: a key in such letters would pass for another than it is.
    "json_allowed_escapes": '"\\bfnrt',
}
LLGUIDANCE_OPTIONS: Mapping[str, Any] = {
    **_STRICT,
    "whitespace_flexible": True,
    "whitespace_pattern": rf" |\n(?: {{0,{MAX_INDENT}}}|\t{{0,{MAX_INDENT // 4}}})",
}
# JSON in the one way of `json.dumps`. A pattern of blanks would let these in whatever `whitespace_flexible` says.
LLGUIDANCE_ONE_LINE: Mapping[str, Any] = {
    **_STRICT,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_WRITABLE_CONTROLS = frozenset("\b\f\n\r\t")

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_EXACT = 2**53  # of a float, which is what libraries read integers as
_EARLIER_DRAFTS = ("extends", "disallow", "divisibleBy")  # which libraries pass over


def normalized_schema(schema: Any) -> Any:
    """Raises ValueError that names the keyword which no library keeps."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema {schema!r} is neither an object nor true or false")
    _check(schema)
    kept = dict(schema)
    for name in BY_NAME & kept.keys():
        if isinstance(kept[name], Mapping):
            kept[name] = {key: normalized_schema(inner) for key, inner in kept[name].items()}
    for name in (LISTS | SINGLE) & kept.keys():
        inner = kept[name]
        kept[name] = [normalized_schema(one) for one in inner] if isinstance(inner, list) else normalized_schema(inner)
    if isinstance(kept.get("patternProperties"), dict):
        kept["patternProperties"] = {_pattern(key): inner for key, inner in kept["patternProperties"].items()}
    if "pattern" in kept:
        kept["pattern"] = _pattern(kept["pattern"])
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    return _with_format_as_patterns(kept)


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
# What no library keeps.


def _check(schema: Mapping[str, Any]) -> None:
    for name in _EARLIER_DRAFTS:
        if name in schema:
            raise ValueError(f"{name!r} is of an earlier draft of JSON Schema, and is not kept")
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
    # A name that comes twice in a text is one property; names that the schema does not know may.
    names = schema.get("required")
    num_required = len({name for name in names if isinstance(name, str)}) if isinstance(names, list) else 0
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > num_required + 1:
        raise ValueError(f"minProperties {least} cannot be kept where {num_required} properties are required")


def _check_bound(name: str, bound: Any) -> None:
    if isinstance(bound, int | float) and not abs(bound) < _MAX_EXACT:
        raise ValueError(f"{name} {bound} is not kept exactly; give a number within 2^53")


def _values(value: Any) -> Iterator[Any]:
    """It, and all that it is made of."""
    yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _values(one)


def _check_value(name: str, value: Any) -> None:
    match value:
        case str():
            if unwritable := [c for c in value if (c < " " and c not in _WRITABLE_CONTROLS) or c == "\x7f"]:
                raise ValueError(f"{name} with the control character {unwritable[0]!r} is not kept")
        case int() if abs(value) > _MAX_EXACT:
            raise ValueError(f"{name} {value} is not kept exactly; give an integer within 2^53")
        case float() if not math.isfinite(value):
            raise ValueError(f"{name} {value} is no number of JSON")


def _check_reference(reference: str) -> None:
    """It points to where a schema stands, by way of schemas alone: what stands elsewhere is not looked at here."""
    root, *steps = reference.split("/")
    is_place = root == "#"
    while steps and is_place:
        name, *steps = steps
        if name in BY_NAME or name in LISTS:
            is_place = bool(steps)
            steps = steps[1:]
        else:
            is_place = name in SINGLE
    if not is_place:
        raise ValueError(f"the $ref {reference!r} points to no schema within this one, such as '#/$defs/name'")
