"""The lines of a job for several takers, any of which may be lost with the lines that it has in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

from ringcore.batch.lines import InputLine, Take

__all__ = ["Attempt", "SharedLines"]


class Attempt(NamedTuple):
    """num_losses: of takers that had the line in flight."""

    line: InputLine
    num_losses: int = 0


class SharedLines:
    """Each line that was taken ends by `done`, or by `give_back`, after which another taker gets it.

    num_done: of this run. over: set once every line is done.
    """

    def __init__(self) -> None:
        self._take: Take | None = None
        self._returned: deque[Attempt] = deque()
        self._num_in_flight = self.num_done = 0
        self._is_exhausted = False
        self.over = asyncio.Event()
        self._turn = asyncio.Lock()  # one taker waits for the job's queue, the others for it
        self._fetching: asyncio.Future[InputLine | None] | None = None
        self._changed: asyncio.Future[None] | None = None  # done once a line was given back, or all are done

    def open(self, take: Take) -> None:
        """take: of the job; the same by all takers."""
        self._take = take

    async def take(self) -> Attempt | None:
        """None once every line is done. May be cancelled without loss."""
        async with self._turn:
            while not self._is_over():
                if self._returned:
                    self._num_in_flight += 1
                    return self._returned.popleft()
                line = await self._fresh()
                if line is not None:
                    self._num_in_flight += 1
                    return Attempt(line)
        return None

    async def _fresh(self) -> InputLine | None:
        """None if a line was given back, or all are done. It waits for both at once: with results in the order of the
        input the job gives no further line before one that was given back is answered."""
        assert self._take is not None
        if self._fetching is None and not self._is_exhausted:
            self._fetching = asyncio.ensure_future(self._take())
        self._changed = asyncio.get_running_loop().create_future()
        waiting: set[asyncio.Future[Any]] = {self._changed} | ({self._fetching} if self._fetching else set())
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._fetching is None or not self._fetching.done():
            return None
        line, self._fetching = self._fetching.result(), None
        self._is_exhausted = line is None
        return line

    def done(self) -> None:
        self._num_in_flight -= 1
        self.num_done += 1
        if self._is_over():
            self._wake()

    def give_back(self, attempt: Attempt) -> None:
        self._num_in_flight -= 1
        self._returned.append(attempt._replace(num_losses=attempt.num_losses + 1))
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _is_over(self) -> bool:
        if self._is_exhausted and not self._returned and not self._num_in_flight:
            self.over.set()
        return self.over.is_set()

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
