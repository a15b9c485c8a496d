"""Results in the order of the input: each waits until those of all lines before it are written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ringcore.batch.lines import Outcome

__all__ = ["InputOrder"]


class InputOrder:
    """limit: how many results may wait before no more lines are read; those in flight come on top.

    Invariant: `_expected` are the lines that were read and not written, ascending; every key of `_ready` is one.
    """

    def __init__(self, write: Callable[[Outcome], None], limit: int) -> None:
        self._write, self._limit = write, limit
        self._expected: deque[int] = deque()
        self._ready: dict[int, Outcome] = {}
        self._waiter: asyncio.Future[None] | None = None

    def expect(self, numbers: Sequence[int]) -> None:
        """These lines come next in the input."""
        self._expected.extend(numbers)

    def add(self, outcome: Outcome) -> None:
        self._ready[outcome.record.line] = outcome
        while self._expected and (ready := self._ready.pop(self._expected[0], None)) is not None:
            self._expected.popleft()
            self._write(ready)
        if self._waiter is not None and len(self._expected) <= self._limit:
            self._waiter.set_result(None)
            self._waiter = None

    def may_go_on(self) -> asyncio.Future[None] | None:
        """None if further lines may be read; else what is done when they may."""
        if len(self._expected) <= self._limit:
            return None
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
