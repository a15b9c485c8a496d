"""The service's side of the Markdown process: starts it with the first text, ends it when it is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ringcore.errors import InvalidRequestError, QueueFullError, RingcoreError
from ringcore.executor.job_process import JobProcess
from ringcore.serve.markdown.process import CHANNEL, ENTRY, MAX_MEMORY_BYTES

__all__ = ["MarkdownRenderer"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_MAX_WAITING = 32  # calls, each of which takes milliseconds
_START_S = 60.0  # the imports, on a loaded machine
_MAX_MIB = MAX_MEMORY_BYTES >> 20


class MarkdownRenderer:
    """Texts to blocks, one call at a time, in a process that never outlives its use.

    ended: returns once the engine of the service has ended. timeout_s: of one call. idle_s: the process ends after so
    long without a call. It belongs to the event loop of the calls.

    Invariant: while there is a process, `_watch` runs, and ends it.
    """

    def __init__(
        self, ended: Callable[[], Coroutine[Any, Any, object]], timeout_s: float = 5.0, idle_s: float = 60.0
    ) -> None:
        self._ended, self._timeout_s, self._idle_s = ended, timeout_s, idle_s
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._process: JobProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._used_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process's, if one runs."""
        return None if self._process is None else self._process.child.pid

    async def render(self, texts: Sequence[str]) -> bytes:
        """JSON: for each text a list of `nodes.Block`s.

        Raises `InvalidRequestError` for texts that take too long or too much memory, `QueueFullError`, and
        `RingcoreError` if the process cannot be started.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise QueueFullError(
                f"{self._num_waiting} calls wait to be rendered, and at most {_MAX_WAITING} may; try again in a second",
                num_waiting=self._num_waiting,
                limit=_MAX_WAITING,
            )
        self._num_waiting += 1
        try:
            async with self._lock:
                return await self._run(msgspec.json.encode(texts))
        finally:
            self._num_waiting -= 1

    async def _run(self, body: bytes) -> bytes:
        for is_last in (False, True):
            try:
                process = await self._ready()
                process.send(body)
                answer = await self._awaited(process, process.poll_answer, self._timeout_s)
            except BaseException:  # also cancelled: this call's answer must not become that of the next one
                self._end()
                raise
            self._used_s = time.monotonic()
            if answer is not None:
                return answer
            how = None if process.child.is_alive() else process.child.describe_end()
            self._end()
            _log.warning("the chat page's Markdown process %s", "took too long" if how is None else f"died: {how}")
            if how is None:
                raise _refused(f"they took longer than {self._timeout_s:g} s to render")
            if is_last:  # the first time the texts may not be the cause
                break
        raise _refused(f"the Markdown process died at them twice ({how}): they need more than {_MAX_MIB} MiB to render")

    async def _ready(self) -> JobProcess:
        if self._process is not None and not self._process.child.is_alive():
            self._end()
        if self._process is None:
            self._process = JobProcess("markdown", ENTRY, b"", CHANNEL)
            self._used_s = time.monotonic() + _START_S
            self._watching = asyncio.create_task(self._watch(self._process))
        process = self._process
        if not process.is_ready and not await self._awaited(process, lambda: process.poll_ready() or None, _START_S):
            raise RingcoreError(f"the Markdown process did not start: {process.child.describe_end()}")
        return process

    async def _awaited(self, process: JobProcess, poll: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """What `poll` finds; None after the timeout, or once the process has ended."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + timeout_s
        fds = process.channel.fileno(), process.child.pidfd
        for fd in fds:
            loop.add_reader(fd, woken.set)
        try:
            while True:
                is_over = not process.child.is_alive() or loop.time() >= deadline
                process.write()
                if (found := poll()) is not None or is_over:
                    return found
                if process.has_backlog:
                    loop.add_writer(fds[0], woken.set)
                woken.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await woken.wait()
                loop.remove_writer(fds[0])
        finally:
            loop.remove_writer(fds[0])
            for fd in fds:
                loop.remove_reader(fd)

    # -----------------------------------------------------------------------------------------------------------
    # Ending the process.

    async def _watch(self, process: JobProcess) -> None:
        """Until the process is idle or the engine ends."""
        ended = asyncio.create_task(self._ended())
        try:
            while not ended.done() and (left_s := self._used_s + self._idle_s - time.monotonic()) > 0:
                await asyncio.wait([ended], timeout=min(left_s, self._idle_s))
        finally:
            ended.cancel()
            async with self._lock:
                if self._process is process:
                    self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        watching, self._watching = self._watching, None
        if watching is not None and watching is not asyncio.current_task():
            watching.cancel()
        if process is not None:
            process.kill().terminate()  # returns soon: it was killed before


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"texts: {why}; send less", field="texts", value=None)
