"""The lines of an input: how one is answered, in the form of the input."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import NamedTuple, Protocol

from ringcore.batch.journal import Record
from ringcore.openai_api.served_model import ServedModel

__all__ = ["InputLine", "LineError", "LineForm", "Outcome", "Take", "seed_of_line"]


class InputLine(NamedTuple):
    """number: from 1. text: None for a line that is too long to be kept."""

    number: int
    text: bytes | None


class Outcome(NamedTuple):
    """The result of a line, with its line feed, and what the journal says of it."""

    record: Record
    written: bytes


Take = Callable[[], Awaitable[InputLine | None]]  # the next line, None if there is none; may be cancelled without loss


class LineError(Exception):
    """A line is no request at all. args: code, message."""


class LineForm(Protocol):
    """One form of lines and of results."""

    def prefix(self, text: bytes) -> bytes:
        """What the line's prompt begins with: lines that share more of it are nearer each other in its order."""
        ...

    async def answer(self, model: ServedModel, line: InputLine) -> Outcome:
        """Raises whatever keeps the line from being answered."""
        ...

    def failed(self, line: InputLine, error: Exception) -> Outcome:
        """The error record of what `answer` raised."""
        ...


def seed_of_line(job_seed: int, number: int) -> int:
    """The seed of a request that brings none: whatever happens to the job, the line draws the same tokens."""
    return int.from_bytes(blake2b(f"{job_seed} {number}".encode(), digest_size=8).digest()) >> 2
