"""An incremental JSON scanner: finds the end of one value in a text that arrives in pieces, in linear time."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["JsonScanner", "skip_blanks"]

MAX_DEPTH = 128  # that every JSON library can parse
MAX_SCALAR_CHARS = 1000  # of a number; Python's int() accepts 4,300 digits

_BLANKS = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}

# What is expected next. After "first ..." the container may also end.
_Mode = Literal[
    "value",
    "first value",
    "key",
    "first key",
    "colon",
    "next",
    "string",
    "escape",
    "hex",
    "scalar",
    "complete",
    "broken",
]


def skip_blanks(text: str, position: int) -> int:
    """The position of the first character from `position` on that is not JSON whitespace."""
    match = _BLANKS.match(text, position)
    assert match is not None
    return match.end()


class JsonScanner:
    """Parses RFC 8259 strictly. `scan` consumes the value's text and stops after it, or at a syntax error.

    A top-level number, `true`, `false` or `null` is complete only when another character follows.
    """

    def __init__(self) -> None:
        self._mode: _Mode = "value"
        self._open: list[str] = []  # the enclosing containers, outermost first
        self._string_is_key = False
        self._num_hex = 0
        self._scalar = ""

    @property
    def is_complete(self) -> bool:
        return self._mode == "complete"

    @property
    def is_broken(self) -> bool:
        return self._mode == "broken"

    def scan(self, text: str, position: int = 0) -> int:
        """Consumes `text` from `position` on; returns where it stopped."""
        while position < len(text) and self._mode not in ("complete", "broken"):
            match self._mode:
                case "string":
                    position = self._in_string(text, position)
                case "escape" | "hex":
                    position = self._in_escape(text, position)
                case "scalar":
                    position = self._in_scalar(text, position)
                case _:
                    position = skip_blanks(text, position)
                    if position < len(text):
                        position = self._between(text[position], position)
        return position

    def _in_string(self, text: str, position: int) -> int:
        match = _STRING_RUN.match(text, position)
        assert match is not None
        position = match.end()
        if position == len(text):
            return position
        if text[position] == '"':
            if self._string_is_key:
                self._mode = "colon"
            else:
                self._after_value()
        elif text[position] == "\\":
            self._mode = "escape"
        else:
            return self._break(position)
        return position + 1

    def _in_escape(self, text: str, position: int) -> int:
        character = text[position]
        if self._mode == "escape":
            if character == "u":
                self._mode, self._num_hex = "hex", 4
            elif character in '"\\/bfnrt':
                self._mode = "string"
            else:
                return self._break(position)
        elif character in "0123456789abcdefABCDEF":
            self._num_hex -= 1
            if not self._num_hex:
                self._mode = "string"
        else:
            return self._break(position)
        return position + 1

    def _in_scalar(self, text: str, position: int) -> int:
        match = _SCALAR_RUN.match(text, position)
        assert match is not None
        end = min(match.end(), position + MAX_SCALAR_CHARS - len(self._scalar))
        self._scalar += text[position:end]
        if end < match.end():
            return self._break(end)
        if end < len(text):
            if not _SCALAR.fullmatch(self._scalar):
                return self._break(end)
            self._scalar = ""
            self._after_value()
        return end

    def _between(self, character: str, position: int) -> int:
        """Consumes a character outside strings and scalars."""
        mode = self._mode
        if self._open and character == _CLOSING[self._open[-1]] and mode in ("next", "first key", "first value"):
            self._open.pop()
            self._after_value()
        elif mode == "next" and character == ",":
            self._mode = "key" if self._open[-1] == "{" else "value"
        elif mode == "colon" and character == ":":
            self._mode = "value"
        elif mode in ("key", "first key") and character == '"':
            self._mode, self._string_is_key = "string", True
        elif mode in ("value", "first value"):
            return self._begin_value(character, position)
        else:
            return self._break(position)
        return position + 1

    def _begin_value(self, character: str, position: int) -> int:
        if character == '"':
            self._mode, self._string_is_key = "string", False
        elif character in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open.append(character)
            self._mode = "first key" if character == "{" else "first value"
        elif character in "-0123456789tfn":
            self._mode = "scalar"
            return position
        else:
            return self._break(position)
        return position + 1

    def _after_value(self) -> None:
        self._mode = "next" if self._open else "complete"

    def _break(self, position: int) -> int:
        self._mode = "broken"
        return position
