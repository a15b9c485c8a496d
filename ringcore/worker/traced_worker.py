"""What a worker needs so that it can be traced: its tracer, and the methods that begin and end a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ringcore.tracing import Tracer, check_seconds, now_ns
from ringcore.worker.rpc import rpc

__all__ = ["DeviceSpan", "Recorder", "TracedWorker"]

DeviceSpan = tuple[str, str, int, int]  # name, track, begin and end: nanoseconds of CLOCK_MONOTONIC


class Recorder(Protocol):
    """Records kernels or operators, from its creation to `stop`."""

    def stop(self) -> Sequence[DeviceSpan]: ...


class TracedWorker:
    """A base class of workers. `tracer` and `rank` are set by the subclass.

    Both methods run between two steps, in the thread of the steps. A trace that is not stopped ends by its deadline.
    """

    rank: int
    tracer: Tracer
    _recorder: Recorder | None = None

    @rpc(scope="read")
    def start_trace(self, seconds: float, operators: bool = False) -> None:
        """Records what this worker does, for `seconds` at most: on a GPU its kernels too, and the operators on
        request, which slows it down."""
        check_seconds(seconds)
        self._end_recorder()
        self._recorder = self.begin_recorder(operators)
        self.tracer.on_end = self._end_recorder
        self.tracer.start(now_ns() + round(seconds * 1e9))

    @rpc(scope="read")
    def stop_trace(self) -> bytes:
        """Ends it; -> what was recorded: `tracing.ProcessTrace`, encoded."""
        recorder, self._recorder = self._recorder, None
        self.tracer.is_on = False  # what follows is no part of it
        more = () if recorder is None else recorder.stop()
        return msgspec.msgpack.encode(self.tracer.take(f"worker {self.rank}", more))

    def begin_recorder(self, operators: bool) -> Recorder | None:
        """Begins to record kernels and operators; None where there are none."""
        return None

    def _end_recorder(self) -> None:
        """Drops the recording, which no call collected before its deadline."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
