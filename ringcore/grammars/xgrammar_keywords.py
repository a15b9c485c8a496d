"""The JSON schema keywords that xgrammar would ignore silently: they are refused here, or rewritten.

`ringcore.grammars.json_schemas` has refused before what no library can enforce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ringcore.grammars.json_formats import FORMAT_PATTERNS
from ringcore.grammars.json_schemas import BY_NAME, LISTS, SINGLE
from ringcore.grammars.regular_expressions import ANY, Node, Repeat, search_regex, write_regex
from ringcore.grammars.xgrammar_regex import in_json_string

__all__ = ["unsupported_keyword", "with_string_patterns"]

# Constraints that xgrammar ignores, or enforces only in part.
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
_ALONE = ("$ref", "anyOf", "enum", "const")  # xgrammar ignores keywords beside one of these
_FORMATS = frozenset(name for name, patterns in FORMAT_PATTERNS.items() if len(patterns) == 1)
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
# xgrammar ignores each of these without a type beside it.
_NEEDS_TYPE = frozenset(
    (
        *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "required"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def with_string_patterns(schema: Any) -> Any:
    """The schema with patterns, and string lengths as patterns, of the raw text between a string's quotes: xgrammar
    applies a pattern to that text, and accepts control characters in strings with a length. Raises ValueError."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in BY_NAME & result.keys():
        result[name] = {key: with_string_patterns(one) for key, one in result[name].items()}
    for name in LISTS & result.keys():
        result[name] = [with_string_patterns(one) for one in result[name]]
    for name in SINGLE & result.keys():
        result[name] = with_string_patterns(result[name])
    low, high = result.pop("minLength", None), result.pop("maxLength", None)
    if "pattern" in result:
        result["pattern"] = _between_quotes(search_regex(result["pattern"]))
    elif low is not None or high is not None:
        result["pattern"] = _between_quotes(Repeat(ANY, low or 0, high))
    return result


def _between_quotes(node: Node) -> str:
    return f"^(?:{write_regex(in_json_string(node))})$"


def unsupported_keyword(schema: Any) -> str | None:
    """A part of the schema that xgrammar might not enforce; None where it enforces all."""
    left = [schema]
    while left:
        one = left.pop()
        if one is True:
            continue
        if not isinstance(one, dict):
            return f"the schema {one!r}"
        if (unsupported := _unsupported(one)) is not None:
            return unsupported
        left += _inner(one)
    return None


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """Its direct subschemas."""
    for name in BY_NAME & schema.keys():
        yield from schema[name].values()
    for name in LISTS & schema.keys():
        yield from schema[name]
    for name in SINGLE & schema.keys():
        if schema[name] is not False:
            yield schema[name]


def _unsupported(schema: dict[str, Any]) -> str | None:
    """Of the schema's own keywords, without those of its subschemas."""
    for name in sorted(_NEVER & schema.keys()):
        return f"{name!r}"
    for names, kind in ((BY_NAME, dict), (LISTS, list)):
        for name in sorted(names & schema.keys()):
            if not isinstance(schema[name], kind):
                return f"{name!r} that is no {kind.__name__}"
    for name in _COUNTS:
        if name in schema and (type(schema[name]) is not int or schema[name] < 0):
            return f"{name!r} that is no count"
    if (unsupported := _unsupported_type(schema)) is not None:
        return unsupported
    for name in _ALONE:
        if name in schema and (others := (_CONSTRAINTS & schema.keys()) - {name}):
            if name in ("enum", "const") and others == {"type"} and _all_of_type(schema, name):
                continue
            return f"{sorted(others)[0]!r} beside {name!r}"
    if (text := schema.get("format")) is not None and text not in _FORMATS:
        return f"the format {text!r}"
    return _unsupported_of_string(schema) or _unsupported_of_object(schema)


def _types(schema: dict[str, Any]) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _unsupported_type(schema: dict[str, Any]) -> str | None:
    types = _types(schema)
    if "type" in schema and not (types and all(isinstance(one, str) and one in _TYPES for one in types)):
        return f"the type {schema['type']!r}"
    if "type" in schema or "properties" in schema:  # which implies the type object
        return None
    return next((f"{name!r} without a type" for name in sorted(_NEEDS_TYPE & schema.keys())), None)


def _all_of_type(schema: dict[str, Any], name: str) -> bool:
    values = schema[name] if name == "enum" else [schema[name]]
    return isinstance(values, list) and all(any(_TYPES[t](v) for t in _types(schema)) for v in values)


def _unsupported_of_string(schema: dict[str, Any]) -> str | None:
    """A string can have one pattern only."""
    given = sorted(name for name in ("format", "pattern") if name in schema)
    lengths = sorted(name for name in ("minLength", "maxLength") if name in schema)
    if given and (others := given[1:] + lengths):
        return f"{others[0]!r} beside {given[0]!r}"
    return None


def _unsupported_of_object(schema: dict[str, Any]) -> str | None:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(required, list):
        return "'required' that is no list"
    for name in required:
        if not isinstance(name, str) or name not in properties:
            return f"the required property {name!r} that 'properties' does not have"
    if properties and schema.get("additionalProperties", False) is not False:
        return "'additionalProperties' beside 'properties': a property might be duplicated"
    return None
