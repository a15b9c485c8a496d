"""Threads that read and write files, on a file system that may hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

__all__ = ["DiskThreads"]

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DiskThreads:
    """`num_threads` threads that run functions in their order. They are daemons: a hung one is never joined, also not
    by the interpreter at its exit."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._busy_since: list[float | None] = [None] * num_threads
        self._is_closed = False
        for index in range(num_threads):
            Thread(target=self._run, args=(index,), name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """A future of its value, which can be cancelled until a thread has begun it. After `close` it is."""
        future: Future[T] = Future()
        if self._is_closed:
            future.cancel()
        else:
            self._queue.put((future, function))
        return future

    def stuck_s(self) -> float:
        """For how many seconds the function runs that was begun first of those in progress."""
        began = [since for since in self._busy_since if since is not None]
        return time.monotonic() - min(began) if began else 0.0

    def close(self) -> None:
        """Begins nothing any more: what has not begun is cancelled. Does not wait. Idempotent."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job[0].cancel()
        for _ in self._busy_since:
            self._queue.put(None)

    def _run(self, index: int) -> None:
        while (job := self._queue.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            self._busy_since[index] = time.monotonic()
            try:
                value = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)
            self._busy_since[index] = None
            del job, future, function  # with the memory that they refer to
