"""A request that moves to another replica when its own dies or sleeps, as long as its reader has got nothing."""

from __future__ import annotations

from collections.abc import Awaitable

from ringcore.errors import EngineDeadError, SleepingError, WorkerDiedError
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.replicas.placement import Placement
from ringcore.front_end.request_streams import RequestStream
from ringcore.params.outputs import RequestOutput

__all__ = ["MovingStream", "begin"]

_MAX_DEATHS = 2  # of replicas under one request: the next one may be its own fault


async def begin(placement: Placement, prepared: PreparedRequest) -> MovingStream:
    """Sends a request. Raises as `Placement.send`."""
    return MovingStream(placement, prepared, await placement.send(prepared))


class MovingStream:
    """A `BegunStream`."""

    def __init__(self, placement: Placement, prepared: PreparedRequest, stream: RequestStream) -> None:
        self._placement, self._prepared, self._stream = placement, prepared, stream
        self._has_output = self._is_dropped = False
        self._moves = False  # to another replica: the next wait is for that
        self._num_deaths = 0

    def take(self) -> RequestOutput | None:
        try:
            output = self._stream.take()
        except WorkerDiedError:
            raise  # the engine lives, and has found this request to be the cause
        except EngineDeadError:
            self._num_deaths += 1
            if self._has_output or self._num_deaths > _MAX_DEATHS:
                raise
            self._moves = True
            return None
        if output is None or self._has_output:
            return output
        if self._is_refused(output):
            self._moves = True
            return None
        self._has_output = True
        return output

    def wait(self) -> Awaitable[None]:
        return self._move() if self._moves else self._stream.wait()

    async def _move(self) -> None:
        self._stream, self._moves = await self._placement.send(self._prepared), False
        if self._is_dropped:
            self._stream.drop()

    def _is_refused(self, output: RequestOutput) -> bool:
        """Whether its replica sleeps, as its stats say from now on, and another one does not."""
        return isinstance(output.error, SleepingError) and self._placement.is_any_awake

    def wake(self) -> None:
        self._stream.wake()

    def drop(self) -> None:
        self._is_dropped = True
        self._stream.drop()
