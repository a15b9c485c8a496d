"""What a task waits for again and again, cheaper than a new `asyncio.Future` each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextvars import Context
from typing import Any

__all__ = ["Waiter", "set_all"]


class Waiter:
    """One task at a time awaits it; `set` runs that task, which a future would leave to another callback of the loop.

    It is a future to asyncio, by the protocol that `asyncio.isfuture` names. All is called in the thread of `loop`.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_cancelled", "_context", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._callback: Callable[[Waiter], object] | None = None  # while a task waits
        self._context: Context | None = None  # the task's
        self._cancelled: asyncio.CancelledError | None = None  # what the wait ends with

    def __await__(self) -> Generator[Waiter, None, None]:
        self._asyncio_future_blocking = True
        yield self  # the task has then called `result`

    def set(self) -> None:
        """Ends the wait, if a task waits. Within a task it must be left to `call_soon`, since tasks do not nest."""
        callback, self._callback = self._callback, None
        if callback is not None and self._context is not None:
            self._context.run(callback, self)

    # -----------------------------------------------------------------------------------------------------------
    # Called by the task.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Waiter], object], *, context: Context) -> None:
        assert self._callback is None, "another task waits for this"
        self._callback, self._context = callback, context

    def cancel(self, msg: Any = None) -> bool:
        """The task goes on by a later callback of the loop."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._loop.call_soon(callback, self, context=self._context)
        return True

    def result(self) -> None:
        cancelled, self._cancelled = self._cancelled, None
        if cancelled is not None:
            raise cancelled


def set_all(waiters: Iterable[Waiter]) -> None:
    """Sets each; a callback of their loop."""
    rest = iter(waiters)
    try:
        for waiter in rest:
            waiter.set()
    except BaseException:  # a task's KeyboardInterrupt or SystemExit, which ends the loop
        for waiter in rest:
            waiter.get_loop().call_soon(waiter.set)
        raise
