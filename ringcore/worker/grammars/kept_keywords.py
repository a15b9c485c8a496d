"""What of a JSON schema xgrammar would leave out without a word, or write as no JSON: it is refused here instead, or
said in other words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["in_kept_words", "unkept_keyword", "unkept_regex"]

# Those that constrain a value and that it knows nothing of, or less than they mean.
_NEVER = frozenset(
    (
        *("not", "if", "then", "else", "oneOf", "allOf", "contains", "minContains", "maxContains", "uniqueItems"),
        *("multipleOf", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "patternProperties"),
        *("unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties", "additionalItems"),
        *("$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id", "id", "extends", "disallow"),
    )
)
_CONSTRAINTS = frozenset(
    (
        *("type", "enum", "const", "anyOf", "$ref", "properties", "required", "additionalProperties", "items"),
        *("prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_ALONE = ("$ref", "anyOf", "enum", "const")  # what stands beside one of these is left out
_FORMATS = frozenset(("date", "time", "date-time", "uuid", "ipv4", "ipv6"))
_LENGTHS = ("minLength", "maxLength", "format")
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
# A group that looks around, a place between characters, a group once more.
_UNKEPT_REGEX = re.compile(r"(?<!\\)(?:\\\\)*(\(\?[=!<]|\\[bBAzZ]|\\[1-9])")
# A pattern's characters are written into the string as they are: those that JSON escapes would end it, or break it.
_ESCAPED_IN_JSON = re.compile(r"[\x00-\x1f\"]|\\[\\nrtfv0xucDWSpP]")
_RANGE = re.compile(r"([^\\])-([^\]])")
_PLAIN_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"  # that JSON need not escape
_BY_NAME, _LISTS, _SINGLE = (
    {"properties", "$defs", "definitions"},
    {"anyOf", "prefixItems"},
    {"items", "additionalProperties"},
)


def unkept_regex(regex: str) -> str | None:
    """The part of a regular expression that xgrammar would leave out."""
    found = _UNKEPT_REGEX.search(regex)
    return None if found is None else f"{found[1]} of a regular expression"


def in_kept_words(schema: Any) -> Any:
    """The schema with the lengths of strings as patterns: xgrammar lets control characters into strings of a length."""
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    for name in _BY_NAME & kept.keys():
        kept[name] = {key: in_kept_words(one) for key, one in kept[name].items()}
    for name in _LISTS & kept.keys():
        kept[name] = [in_kept_words(one) for one in kept[name]]
    for name in _SINGLE & kept.keys():
        kept[name] = in_kept_words(kept[name])
    low, high = kept.pop("minLength", None), kept.pop("maxLength", None)
    if low is not None or high is not None:
        kept["pattern"] = f"^{_PLAIN_CHARACTER}{{{low or 0},{'' if high is None else high}}}$"
    return kept


def unkept_keyword(schema: Any) -> str | None:
    """A part of the schema that a completion by xgrammar might not keep; None where it keeps all."""
    left = [schema]
    while left:
        one = left.pop()
        if one is True:
            continue
        if not isinstance(one, dict):
            return f"the schema {one!r}"
        if (unkept := _unkept(one)) is not None:
            return unkept
        left += _inner(one)
    return None


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that it is made of."""
    for name in _BY_NAME & schema.keys():
        yield from schema[name].values()
    for name in _LISTS & schema.keys():
        yield from schema[name]
    for name in _SINGLE & schema.keys():
        if schema[name] is not False:
            yield schema[name]


def _unkept(schema: dict[str, Any]) -> str | None:
    """Of its own keywords, those of the schemas in it left out."""
    for name in sorted(_NEVER & schema.keys()):
        return f"{name!r}"
    for names, kind in ((_BY_NAME, dict), (_LISTS, list)):
        for name in sorted(names & schema.keys()):
            if not isinstance(schema[name], kind):
                return f"{name!r} that is no {kind.__name__}"
    for name in ("minLength", "maxLength"):
        if name in schema and (type(schema[name]) is not int or schema[name] < 0):
            return f"{name!r} that is no count"
    for name in _ALONE:
        if name in schema and (others := (_CONSTRAINTS & schema.keys()) - {name}):
            if name in ("enum", "const") and others == {"type"} and _all_of_type(schema, name):
                continue
            return f"{sorted(others)[0]!r} beside {name!r}"
    if "$ref" in schema and not str(schema["$ref"]).startswith("#"):
        return f"a $ref to elsewhere, {schema['$ref']!r}"
    if (text := schema.get("format")) is not None and text not in _FORMATS:
        return f"the format {text!r}"
    return _unkept_of_string(schema) or _unkept_of_object(schema)


def _all_of_type(schema: dict[str, Any], name: str) -> bool:
    values = schema[name] if name == "enum" else [schema[name]]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return isinstance(values, list) and all(any(_TYPES[t](v) for t in types if t in _TYPES) for v in values)


def _unkept_of_string(schema: dict[str, Any]) -> str | None:
    if (pattern := schema.get("pattern")) is None:
        if "format" in schema and any(name in schema for name in ("minLength", "maxLength")):
            return "lengths beside 'format'"
        return None
    for name in _LENGTHS:
        if name in schema:
            return f"{name!r} beside 'pattern'"
    return unkept_regex(str(pattern)) or _unescaped(str(pattern))


def _unescaped(pattern: str) -> str | None:
    if (found := _ESCAPED_IN_JSON.search(pattern)) is not None:
        return f"{found[0]!r} in a pattern"
    for low, high in _RANGE.findall(pattern):
        if low <= high and (low < " " or low <= '"' <= high or low <= "\\" <= high):
            return f"the range {low}-{high} in a pattern"
    return None


def _unkept_of_object(schema: dict[str, Any]) -> str | None:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                return f"the required property {name!r} that 'properties' does not have"
    if properties and schema.get("additionalProperties", False) is not False:
        return "'additionalProperties' beside 'properties': a property might come twice"
    return None
