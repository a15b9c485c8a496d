"""Records a trace of a running engine, from any of its clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.engine_caller import EngineCaller
from ringcore.tracing import MAX_TRACE_S, ProcessTrace, check_seconds
from ringcore.tracing.timeline import timeline
from ringcore.version import __version__

__all__ = ["Recording", "record_timeline"]

_MARGIN_S = 5.0  # a tracer that is not stopped ends so much later
_CALL_S = 60.0  # a worker answers after the steps in flight, and has kernels to read
_FRONT_END_S, _POLL_S = 2.0, 0.05


def record_timeline(
    caller: EngineCaller, seconds: float, operators: bool = False, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """The contents of a trace file: what every process of the engine does for `seconds`.

    operators: torch's too, which slows the workers. sleep: waits for the trace; if it raises KeyboardInterrupt the
    trace ends earlier. A process that cannot be traced is left out, and the file's notes say so. Raises
    `InvalidRequestError` while another trace is recorded, and `EngineDeadError`.
    """
    recording = Recording(caller, seconds, operators)
    try:
        sleep(seconds)
    except KeyboardInterrupt:
        recording.notes.append(f"interrupted: it was to take {seconds} s")
    except BaseException:
        recording.stop()
        raise
    return recording.stop()


class Recording:
    """One trace, from its construction, which raises as `record_timeline`, to `stop`. notes: of what is missing."""

    def __init__(self, caller: EngineCaller, seconds: float, operators: bool = False) -> None:
        check_seconds(seconds)
        self._caller = caller
        self._has_workers = False
        self.notes: list[str] = []
        self._start(min(seconds + _MARGIN_S, MAX_TRACE_S), operators)

    def _start(self, limit_s: float, operators: bool) -> None:
        """The engine begins first: it refuses a second trace."""
        caller = self._caller
        self._has_workers = any(
            one["target"] == "workers" and one["name"] == "start_trace" for one in caller.call_engine("methods")
        )
        caller.call_engine("start_trace", (limit_s,), timeout=_CALL_S)
        if not self._has_workers:
            self.notes.append("workers: left out; their class is not a TracedWorker")
            return
        try:
            caller.collective_rpc("start_trace", (limit_s, operators), timeout=_CALL_S)
        except EngineDeadError:
            raise
        except RingcoreError as error:
            self._has_workers = False
            self.notes.append(f"workers: left out; {error.message}")

    def stop(self) -> dict[str, Any]:
        """Ends it, unless its time is over; -> the contents of a trace file, of the processes that have a trace."""
        return timeline(self._taken(), self.notes, __version__)

    def _taken(self) -> list[ProcessTrace]:
        """In the order of the file."""
        engine = self._caller.call_engine("stop_trace", timeout=_CALL_S)
        workers = self._workers()  # they still record
        encoded = [*self._front_end(), engine, *workers]
        return [msgspec.msgpack.decode(one, type=ProcessTrace) for one in encoded]

    def _workers(self) -> list[bytes]:
        if not self._has_workers:
            return []
        try:
            traces: list[bytes] = self._caller.collective_rpc("stop_trace", timeout=_CALL_S)
        except EngineDeadError:
            raise
        except RingcoreError as error:
            self.notes.append(f"workers: left out; {error.message}")
            return []
        return traces

    def _front_end(self) -> list[bytes]:
        deadline = time.monotonic() + _FRONT_END_S
        while time.monotonic() < deadline:
            if (trace := self._caller.call_engine("front_end_trace", timeout=_CALL_S)) is not None:
                return [trace]
            time.sleep(_POLL_S)
        self.notes.append(
            f"front end: left out; it did not answer within {_FRONT_END_S} s, as one that waits for nothing"
        )
        return []
