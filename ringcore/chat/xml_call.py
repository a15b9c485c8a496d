"""Qwen3-Coder's call syntax: `<function=name>`, then `<parameter=key>` and a value each, then `</function>`.

Values are plain text, so their JSON types come from the tool's schema.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn

from ringcore.chat.call_body import CallBody
from ringcore.chat.json_scanner import skip_blanks
from ringcore.chat.markers import partial_marker_length
from ringcore.chat.tools import ToolSchemas

__all__ = ["FUNCTION", "XmlCall"]

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME_RUN = re.compile(r"[^<>\n]*")

_Mode = Literal["open", "name", "between", "key", "value", "complete", "broken"]


class XmlCall(CallBody):
    """Parses one call. `name` is set once it is known to be a tool's.

    The single line breaks before and after a value are layout. A string value is streamed; a value of another type by
    the schema is buffered until complete, and becomes a string where it is not of that type.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._mode: _Mode = "open"
        self._word: list[str] = []  # the current name or key
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # a buffered value other than a string
        self._is_value_begun = False

    def scan(self, text: str) -> int:
        """Consumes the call's text; returns the position after it, of the error, or of a partial marker, which the
        caller passes again with more text.
        """
        position = 0
        while position < len(text) and self._mode not in ("complete", "broken"):
            if self._mode in ("name", "key"):
                position = self._in_word(text, position)
                continue
            taken = self._in_value(text, position) if self._mode == "value" else self._at_marker(text, position)
            if taken is None:
                break
            position = taken
        return position

    def _at_marker(self, text: str, position: int) -> int | None:
        """Consumes whitespace and one marker. None where more text is needed."""
        start = skip_blanks(text, position)
        if start == len(text):
            return start
        expected: dict[str, _Mode] = {FUNCTION: "name"}
        if self._mode == "between":
            expected = {PARAMETER: "key", FUNCTION_END: "complete"}
        for marker, mode in expected.items():
            if text.startswith(marker, start):
                self._mode = mode
                if mode == "complete":
                    self._arguments.append("}")
                return start + len(marker)
        if any(marker.startswith(text[start : start + len(marker)]) for marker in expected):
            return None
        self._mode = "broken"
        return start

    def _in_word(self, text: str, position: int) -> int:
        match = _NAME_RUN.match(text, position)
        assert match is not None
        end = match.end()
        self._word.append(text[position:end])
        if end == len(text):
            return end
        word = "".join(self._word).strip()
        self._word.clear()
        if text[end] != ">":
            self._mode = "broken"
            return end
        if self._mode == "name":
            self._begin_arguments(word)
        else:
            self._begin_value(word)
        return end + 1

    def _begin_arguments(self, name: str) -> None:
        if name not in self._tools:
            self._mode = "broken"
            return
        self.name, self._mode = name, "between"
        self._arguments.append("{")

    def _begin_value(self, key: str) -> None:
        if not key or key in self._keys:
            self._mode = "broken"
            return
        assert self.name is not None
        self._arguments.append(f"{', ' if self._keys else ''}{_string(key)}: ")
        self._keys.add(key)
        self._types = self._tools.types_of(self.name, key)
        self._is_value_begun, self._mode = False, "value"
        if self._is_string:
            self._arguments.append('"')

    @property
    def _is_string(self) -> bool:
        return not self._types or "string" in self._types

    def _in_value(self, text: str, position: int) -> int | None:
        end = text.find(PARAMETER_END, position)
        stop = end
        if end < 0:
            tail = text[max(position, len(text) - len(PARAMETER_END)) :]
            stop = len(text) - partial_marker_length(tail, ["\n" + PARAMETER_END, PARAMETER_END])
            if stop == position:
                return None
        piece = text[position:stop]
        if not self._is_value_begun and piece:
            piece, self._is_value_begun = piece.removeprefix("\n"), True
        if end < 0:
            self._add_to_value(piece)
            return stop
        self._add_to_value(piece.removesuffix("\n"))
        self._arguments.append('"' if self._is_string else _typed("".join(self._value), self._types))
        self._value.clear()
        self._mode = "between"
        return end + len(PARAMETER_END)

    def _add_to_value(self, piece: str) -> None:
        if self._is_string:
            self._arguments.append(_string(piece)[1:-1])
        else:
            self._value.append(piece)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _typed(written: str, types: frozenset[str]) -> str:
    """The JSON text of a value of one of `types`; a JSON string where it has none of them."""
    text = written.strip()
    if text in ("True", "False") or (text == "None" and "null" in types):
        text = {"True": "true", "False": "false", "None": "null"}[text]  # Python literals
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _string(written)
    return text if _type_of(value) & types else _string(written)


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"integer", "number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
        case _:
            return {"string"}
