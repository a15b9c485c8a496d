"""The outputs of one request, for the caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from ringcore.params.outputs import RequestOutput

__all__ = ["BegunStream", "OutputStream"]


class BegunStream(Protocol):
    """A request that was sent to an engine. All is called in the thread of its reader's loop, but `drop` by finalizers
    too."""

    def take(self) -> RequestOutput | None:
        """The output since the last call; None if there is none yet. Raises the error that ended the request, and
        `StopAsyncIteration` if it was dropped."""
        ...

    def wait(self) -> Awaitable[None]:
        """Ends when `take`, which has just returned None, may return something else."""
        ...

    def wake(self) -> None:
        """Ends a `wait`."""
        ...

    def drop(self) -> None:
        """Aborts it: its reader has gone. Idempotent; takes no lock."""
        ...


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader. It ends after the output that is `finished`."""

    def __init__(self, begin: Callable[[], Awaitable[BegunStream]]) -> None:
        self._begin = begin  # it keeps the engine alive while the stream is read
        self._stream: BegunStream | None = None
        self._is_over = self._is_reading = False

    async def __anext__(self) -> RequestOutput:
        if self._is_reading:
            raise RuntimeError("another task is reading this stream")
        if self._is_over:
            raise StopAsyncIteration
        self._is_reading = True
        try:
            if self._stream is None:
                self._stream = await self._begin()
                if self._is_over:  # closed meanwhile
                    self._end()
            stream = self._stream
            while (output := stream.take()) is None:
                await stream.wait()
            if output.error is not None:
                raise output.error
        except BaseException:  # a cancellation too
            self._end()
            raise
        finally:
            self._is_reading = False
        if output.finished:
            self._is_over = True
        return output

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended. The iteration ends, also for another task that waits in it."""
        self._end()
        if self._stream is not None:
            self._stream.wake()

    def _end(self) -> None:
        self._is_over = True
        if self._stream is not None:
            self._stream.drop()

    def __del__(self) -> None:
        if self._stream is not None and not self._is_over:
            self._end()
