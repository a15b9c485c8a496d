"""A request that moves to another replica when its own dies or sleeps, as long as its reader has got nothing."""

from __future__ import annotations

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
        self._num_deaths = 0

    async def next(self) -> RequestOutput:
        while True:
            try:
                output = await self._stream.next()
            except WorkerDiedError:
                raise  # the engine lives, and has found this request to be the cause
            except EngineDeadError:
                self._num_deaths += 1
                if self._has_output or self._num_deaths > _MAX_DEATHS:
                    raise
            else:
                if self._has_output or not self._is_refused(output):
                    self._has_output = True
                    return output
            self._stream = await self._placement.send(self._prepared)
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
