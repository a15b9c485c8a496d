"""The interface of the incremental parsers of one tool call."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ringcore.chat.tools import ToolSchemas

__all__ = ["CallBody"]


class CallBody(ABC):
    """Parses one call incrementally, from the end of its marker to its end. `name` is set once the call is certain.

    `_mode` is the parser state: "open" at first, "complete" or "broken" at the end, with states of each syntax between.
    """

    _mode: str

    def __init__(self, tools: ToolSchemas) -> None:
        self.name: str | None = None
        self._tools = tools
        self._mode = "open"
        self._arguments: list[str] = []

    @property
    def is_complete(self) -> bool:
        return self._mode == "complete"

    @property
    def is_broken(self) -> bool:
        return self._mode == "broken"

    @abstractmethod
    def scan(self, text: str) -> int:
        """Consumes the text up to the returned position; unless complete or broken, the caller passes the rest again
        with more text.
        """

    def take_arguments(self) -> str:
        """The arguments' JSON text since the last `take_arguments`."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text
