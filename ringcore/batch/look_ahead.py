"""The lines that are still to be run, in an order in which those with a common prefix are near each other.

The input is cut into blocks of `look_ahead` lines, at the same lines in every run of a job, and the lines of a block go
in the order of what their prompts begin with. So the order does not depend on time, nor on what was done before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator

from ringcore.batch.input_order import InputOrder
from ringcore.batch.job import InputFacts
from ringcore.batch.journal import DoneLines
from ringcore.batch.lines import InputLine
from ringcore.batch.options import BatchOptions
from ringcore.batch.sources import HashedChunks, open_input, split_lines
from ringcore.errors import ConfigError

__all__ = ["LookAhead"]

_BLOCK_BYTES = 64 << 20  # a block of long lines is shorter


class LookAhead:
    """One queue for all engines. The next block is read, in a thread, while the lines of this one are taken.

    identity: of the input, which must not change meanwhile. prefix: what a line is ordered by. order: is told of the
    lines that are read, and says when further ones may be; None where results are in any order. stopped: once it is
    done no further line is given.
    """

    def __init__(
        self,
        path: str,
        options: BatchOptions,
        identity: InputFacts,
        *,
        done: DoneLines,
        prefix: Callable[[bytes], bytes],
        order: InputOrder | None,
        stopped: asyncio.Future[None],
    ) -> None:
        self._blocks = _Blocks(path, options, identity, done, prefix)
        self._order, self._stopped = order, stopped
        self._lines: deque[InputLine] = deque()
        self._reading: asyncio.Task[list[InputLine] | None] | None = None
        self._loading = asyncio.Lock()
        self._is_over = False

    async def take(self) -> InputLine | None:
        """The next line; None if there is none. May be cancelled without loss. Raises `ConfigError` for an input that
        cannot be read, or has changed."""
        while not self._stopped.done():
            if self._lines:
                return self._lines.popleft()
            if self._is_over:
                return None
            async with self._loading:
                if not self._lines and not self._is_over:
                    await self._load()
        return None

    async def _load(self) -> None:
        while self._order is not None and (waiting := self._order.may_go_on()) is not None:
            await asyncio.wait((waiting, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                return
        self._reading = self._reading or asyncio.ensure_future(self._read())
        block = await asyncio.shield(self._reading)
        self._reading = None
        if block is None:
            self._is_over = True
            return
        if self._order is not None:
            self._order.expect(sorted(line.number for line in block))
        self._lines.extend(block)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> list[InputLine] | None:
        return await asyncio.to_thread(self._blocks.next)

    async def close(self) -> None:
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._blocks.close()


class _Blocks:
    """The blocks of an input, read in any thread, one call at a time."""

    def __init__(
        self,
        path: str,
        options: BatchOptions,
        identity: InputFacts,
        done: DoneLines,
        prefix: Callable[[bytes], bytes],
    ) -> None:
        self._path, self._options, self._identity = path, options, identity
        self._done, self._prefix = done, prefix
        self._iterator = self._read()

    def next(self) -> list[InputLine] | None:
        """The next block that has lines to run; None at the end."""
        return next(self._iterator, None)

    def close(self) -> None:
        self._iterator.close()

    def _read(self) -> Generator[list[InputLine], None, None]:
        with open_input(self._path) as stream:
            chunks = HashedChunks(stream)
            block: list[InputLine] = []
            num_lines = num_bytes = 0
            for number, text in enumerate(split_lines(iter(chunks), self._options.max_line_bytes), start=1):
                if (text is None or text.strip()) and not self._done.is_done(number):
                    block.append(InputLine(number, text))
                num_lines, num_bytes = num_lines + 1, num_bytes + len(text or b"")
                if num_lines < self._options.look_ahead and num_bytes < _BLOCK_BYTES:
                    continue
                if block:
                    yield self._ordered(block)
                block, num_lines, num_bytes = [], 0, 0
            if block:
                yield self._ordered(block)
        if chunks.facts() != self._identity:
            raise self._changed()

    def _ordered(self, block: list[InputLine]) -> list[InputLine]:
        if block[-1].number > self._done.num_lines:
            raise self._changed()
        return sorted(block, key=lambda line: b"" if line.text is None else self._prefix(line.text))

    def _changed(self) -> ConfigError:
        return ConfigError(
            f"input={self._path!r}: its content has changed while the job ran; the results are not of one input",
            option="input",
            value=self._path,
        )
