"""The names of a request's tools, and the types of their parameters, for the parsers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ToolSchemas"]


class ToolSchemas:
    """The tools of a request, in OpenAI's format: `{"type": "function", "function": {"name", "parameters"}}`.

    None for tools accepts any name. Malformed entries are ignored here: the chat template's checks refuse them.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None) -> None:
        self._takes_any = tools is None
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                self._parameters[name] = _properties(function.get("parameters"))

    @property
    def is_empty(self) -> bool:
        """Whether no name is accepted."""
        return not (self._takes_any or self._parameters)

    def __contains__(self, name: str) -> bool:
        # A lone surrogate, which JSON can escape, is not printable: it could not be encoded for the client.
        return name in self._parameters or (self._takes_any and name.isprintable() and name != "")

    def types_of(self, tool: str, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter may have; empty where the tool's schema declares none."""
        schema = self._parameters.get(tool, {}).get(parameter)
        return frozenset(_types(schema)) if isinstance(schema, Mapping) else frozenset()


def _properties(parameters: object) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> Iterable[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (one for one in declared if isinstance(one, str))
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            one = choice.get("type") if isinstance(choice, Mapping) else None
            if isinstance(one, str):
                yield one
