"""A call written as JSON: `{"name": "f", "arguments": {...}}`, or with `parameters` in place of `arguments`."""

from __future__ import annotations

import json
from typing import Literal

from ringcore.chat.call_body import CallBody
from ringcore.chat.json_scanner import JsonScanner, skip_blanks
from ringcore.chat.tools import ToolSchemas

__all__ = ["JsonCall"]

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")  # written by some models with the name

_Mode = Literal["open", "first key", "key", "colon", "value", "next", "complete", "broken"]


class JsonCall(CallBody):
    """Parses one call. An unknown key breaks it at once, so that an answer in JSON is not held back.

    `name` is set once the call is certain: it is a tool's, and the arguments have started. The keys may be in any
    order; arguments before the name are buffered until the name is complete.
    """

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._mode: _Mode = "open"
        self._scanner: JsonScanner | None = None  # of the current key or value
        self._token: list[str] = []  # the text of the current key or value other than arguments
        self._key = ""
        self._seen: set[str] = set()
        self._given_name: str | None = None

    def scan(self, text: str) -> int:
        """Consumes the call's text; returns the position after it, of the error, or the end of the text."""
        position = 0
        while position < len(text) and self._mode not in ("complete", "broken"):
            if self._scanner is not None:
                position = self._in_token(text, position, self._scanner)
                continue
            position = skip_blanks(text, position)
            if position < len(text):
                position = self._between(text[position], position)
        return position

    def _in_token(self, text: str, position: int, scanner: JsonScanner) -> int:
        end = scanner.scan(text, position)
        into = self._arguments if self._mode == "value" and self._key in _ARGUMENTS else self._token
        into.append(text[position:end])
        if scanner.is_broken:
            self._mode = "broken"
        elif scanner.is_complete:
            self._scanner = None
            self._end_token()
        return end

    def _end_token(self) -> None:
        token = "".join(self._token)
        self._token.clear()
        if self._mode != "value":
            self._key = json.loads(token)
            known = self._key == "name" or self._key in (*_ARGUMENTS, *_IGNORED)
            part = "arguments" if self._key in _ARGUMENTS else self._key
            self._mode = "colon" if known and part not in self._seen else "broken"
            self._seen.add(part)
            return
        self._mode = "next"
        if self._key == "name":
            self._given_name = json.loads(token)
            if self._given_name not in self._tools:
                self._mode = "broken"
            elif "arguments" in self._seen:
                self.name = self._given_name

    def _between(self, character: str, position: int) -> int:
        """Consumes one of the call's own braces, commas and colons, or starts a key or value."""
        match self._mode, character:
            case "open", "{":
                self._mode = "first key"
            case (("first key" | "key"), '"'):
                self._scanner = JsonScanner()
                return position
            case "colon", ":":
                self._mode = "value"
            case "value", _ if character == ("{" if self._key in _ARGUMENTS else '"'):
                self._scanner = JsonScanner()
                if self._key in _ARGUMENTS:
                    self.name = self._given_name
                return position
            case "next", ",":
                self._mode = "key"
            case "next", "}" if self.name is not None:
                self._mode = "complete"
            case _:
                self._mode = "broken"
                return position
        return position + 1
