"""A signal that replaces the engines of a service, one after the other."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Protocol, Self

from ringcore.errors import RingcoreError

__all__ = ["RestartSignal"]

_log = logging.getLogger(__name__)


class _Engines(Protocol):
    @property
    def num_replicas(self) -> int: ...

    async def restart(self) -> None: ...


class RestartSignal:
    """Inside its `with` block the signal asks for new engines, and does not end the process. For the main thread.

    One that comes while the engines start is remembered, and they are replaced once they are ready: they may have
    read files that were changed before the signal. One that comes while engines are replaced, or while the service
    ends, changes nothing.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._was_early = False
        self._on_signal: Callable[[], object] = self._remember

    def __enter__(self) -> Self:
        self._previous = signal.signal(self._number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(self._number, self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Between two instructions of any code: it logs nothing, which could be the code that it interrupts."""
        self._on_signal()

    def _remember(self) -> None:
        self._was_early = True

    @asynccontextmanager
    async def restarting(self, engines: _Engines) -> AsyncIterator[None]:
        """Replaces the engines at each signal while this runs, and at once if one has come before."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        def begin() -> None:
            if tasks:
                _log.warning("%s: the engines are being replaced already", self._number.name)
                return
            task = loop.create_task(_restart(engines))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        self._on_signal = partial(loop.call_soon_threadsafe, begin)
        if self._was_early:
            _log.warning("%s: it came while the engines started", self._number.name)
            begin()
        try:
            yield
        finally:
            self._on_signal = self._remember
            for task in tasks:
                task.cancel()


async def _restart(engines: _Engines) -> None:
    _log.warning("%d engines are replaced, one after the other", engines.num_replicas)
    try:
        await engines.restart()
    except RingcoreError as error:
        _log.error("the engines could not all be replaced: %s", error.message)
    else:
        _log.warning("all engines were replaced")
