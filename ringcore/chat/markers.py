"""Markers in a text that arrives in pieces, and the line breaks around them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TextRun", "find_first", "partial_marker_length"]


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The position of the first marker in `text`, and the marker."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, default=None)


class TextRun:
    """Text between markers. Templates write markers on their own lines, so line breaks next to a marker are layout and
    are dropped; those at either end of the whole output are kept.

    `_held`: the line breaks at the end of the text so far, held back until the following text decides.
    """

    def __init__(self) -> None:
        self._is_after_marker = False
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that `text` releases."""
        if self._is_after_marker:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if not body:
            if text:
                self._held.append(text)
            return ""
        self._is_after_marker = False
        released = self.release() + body
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return released

    def release(self) -> str:
        """The line breaks held back: text at the end of the output, layout before a marker."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def begin_after_marker(self) -> None:
        """Starts a new run after a marker."""
        self._held.clear()
        self._is_after_marker = True
