"""Threads for blocking calls that must not run in an event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["DaemonThreads"]

T = TypeVar("T")


class DaemonThreads:
    """Runs functions in daemon threads, which exit when idle and which the interpreter does not join at its exit.

    max_threads: how many at once; further functions queue. None: each function gets a thread at once, so that none
    waits for another.
    """

    def __init__(self, name: str, max_threads: int | None = None) -> None:
        self._name, self._max_threads = name, max_threads
        self._lock = threading.Lock()
        self._num_threads = 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """The future of the function's result. It cannot be cancelled: a waiter can only stop waiting."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._waiting.append((future, function))
            if self._max_threads is not None and self._num_threads >= self._max_threads:
                return future
            self._num_threads += 1
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except BaseException:
            with self._lock:
                self._num_threads -= 1
                if (future, function) in self._waiting:
                    self._waiting.remove((future, function))
            raise
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                future, function = self._waiting.popleft()
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function  # no references while the next function runs
