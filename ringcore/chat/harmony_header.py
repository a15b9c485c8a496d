"""The markers of harmony's messages, and what a message's header says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ringcore.chat.tools import ToolSchemas

__all__ = [
    "CALL",
    "CHANNEL",
    "CHANNELS",
    "CONSTRAIN",
    "END",
    "ENDS",
    "MARKERS",
    "MAX_HEADER_CHARS",
    "MESSAGE",
    "NEXT",
    "RETURN",
    "START",
    "Header",
    "may_be_header",
]

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKERS = frozenset((START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS))
NEXT = f"{START}assistant"  # begins each of the model's messages but the first

CHANNELS = ("analysis", "commentary", "final")
MAX_HEADER_CHARS = 512  # a tool's name has at most 128
_NOT_IN_HEADER = re.compile("|".join(["\n", *map(re.escape, (START, *ENDS))]))
_WORD = re.compile(f"{re.escape(CHANNEL)}|{re.escape(CONSTRAIN)}|(?:(?!<\\|)\\S)+")
_FUNCTIONS = "functions."


def may_be_header(text: str) -> bool:
    """Whether a text is the beginning of a header and the `MESSAGE` after it, all of it included."""
    after_role = text.removeprefix(NEXT)
    _, channel, name = after_role.partition(CHANNEL)
    return (
        _NOT_IN_HEADER.search(after_role) is None
        and _agrees(after_role, (CHANNEL, MESSAGE, " to="))
        and (not channel or _agrees(name, CHANNELS))
    )


def _agrees(text: str, beginnings: Iterable[str]) -> bool:
    return any(text.startswith(one) or one.startswith(text) for one in beginnings)


@dataclass(frozen=True, slots=True)
class Header:
    """The channel and the recipient of a message; its content type is of no use, since arguments are parsed."""

    channel: str | None
    recipient: str | None

    @classmethod
    def read(cls, text: str) -> Header:
        """text: up to `MESSAGE`, with the role or from after it on."""
        words = _WORD.findall(text.removeprefix(NEXT))
        channel = next((name for mark, name in pairwise(words) if mark == CHANNEL), None)
        recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), None)
        return cls(channel, recipient)

    def function(self, tools: ToolSchemas) -> str | None:
        """The tool that the message calls."""
        name = None if self.recipient is None else self.recipient.removeprefix(_FUNCTIONS)
        return name if name is not None and name in tools else None

    @property
    def is_reasoning(self) -> bool:
        """Messages to tools of the model's own chain of thought included."""
        return self.channel == "analysis"

    @property
    def is_content(self) -> bool:
        return self.recipient is None and self.channel in ("final", "commentary", None)
