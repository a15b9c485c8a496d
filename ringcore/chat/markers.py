"""Markers in a text that arrives in pieces, and the line breaks around them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TextRun", "find_first", "partial_marker_length"]


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a marker, and not all of it."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first marker in `text` begins, and which it is."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, default=None)


class TextRun:
    """Text between markers. Templates set markers on lines of their own, so the line breaks next to a marker are
    layout and left out; those at either end of the whole output stay.

    `_held` are the line breaks at the end of the text so far: what follows decides on them.
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
        """The line breaks held back. At the end of the output they are text; before a marker they are layout."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def begin_after_marker(self) -> None:
        """A marker has ended. What is pushed now is a new run."""
        self._held.clear()
        self._is_after_marker = True
