"""What all ways of writing a call have: text that is followed, and arguments that come out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ringcore.chat.tools import ToolSchemas

__all__ = ["CallBody"]


class CallBody(ABC):
    """Follows one call from behind its marker to its end. `name` is set once the call is certain.

    `_mode` says where in the call the position is: "open" at first, "complete" or "broken" at its end, and between
    them what each way of writing has.
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
        """Takes in the text up to the position returned; what is behind it, if neither complete nor broken, is
        given again with more text.
        """

    def take_arguments(self) -> str:
        """The arguments' JSON text since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text
