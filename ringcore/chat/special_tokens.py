"""Removes special tokens from a streamed text."""

from __future__ import annotations

import re

__all__ = ["SpecialTokenFilter"]


class SpecialTokenFilter:
    """Removes special tokens from a text that arrives in pieces, by their text: equal ordinary text is removed too.

    `_held` is text that may be the beginning of a special token: a stop string can split a token's text.
    """

    def __init__(self, tokens: frozenset[str]) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)))
        self._beginnings = {token[0] for token in tokens}
        self._max_held = len(self._tokens[0]) - 1
        self._held = ""

    def feed(self, text: str, *, is_last: bool) -> str:
        text = self._pattern.sub("", self._held + text)
        cut = len(text) if is_last else self._held_from(text)
        self._held = text[cut:]
        return text[:cut]

    def _held_from(self, text: str) -> int:
        for i in range(max(0, len(text) - self._max_held), len(text)):
            # Fast path: models have hundreds of these tokens, but text rarely has one of their first characters.
            if text[i] in self._beginnings and any(token.startswith(text[i:]) for token in self._tokens):
                return i
        return len(text)
