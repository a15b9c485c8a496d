"""Kernels of a GPU, and torch's operators, as spans of a trace: by torch's profiler, on the clock of all other spans.

That of `torch.autograd`: `torch.profiler` imports 900 modules when it starts, which would stop the steps for seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd.profiler import profile

from ringcore.worker.traced_worker import DeviceSpan

__all__ = ["DeviceProfile"]

# Categories of the profiler's events, and the tracks that they get.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATORS = "cpu_op"


class _Event(msgspec.Struct):
    """Microseconds since the base of the file."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[_Event]
    base_time_nanoseconds: int = 0  # since 1970


class DeviceProfile:
    """Records from its creation to `stop`, both in the thread that runs the steps.

    operators: torch's too, each of which then costs some microseconds. The profiler has the wall clock; its distance to
    the monotonic one is read at both ends and interpolated, so that a correction of the wall clock moves nothing far.
    """

    def __init__(self, device: torch.device, operators: bool) -> None:
        kernels_of = "cuda" if device.type == "cuda" else None
        self._profile: Any = profile(use_kineto=True, use_cpu=operators, use_device=kernels_of)
        self._first = _clocks()
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    @staticmethod
    def records(device: torch.device, operators: bool) -> bool:
        """Whether there is anything to record."""
        return operators or device.type == "cuda"

    def stop(self) -> Sequence[DeviceSpan]:
        self._profile.__exit__(None, None, None)
        last = _clocks()
        with tempfile.TemporaryDirectory(prefix="ringcore-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        spans = []
        for event in file.trace_events:
            if event.cat in _ON_DEVICE:
                track = f"stream {event.tid}"
            elif event.cat == _OPERATORS:
                track = f"operators of thread {event.tid}"
            else:
                continue
            began_ns = self._monotonic(file.base_time_nanoseconds + round(event.ts * 1e3), last)
            spans.append((event.name, track, began_ns, began_ns + round(event.dur * 1e3)))
        return spans

    def _monotonic(self, unix_ns: int, last: tuple[int, int]) -> int:
        (first_unix, first_ahead), (last_unix, last_ahead) = self._first, last
        share = min(1.0, max(0.0, (unix_ns - first_unix) / max(1, last_unix - first_unix)))
        return unix_ns - first_ahead - round(share * (last_ahead - first_ahead))


def _clocks() -> tuple[int, int]:
    """The wall clock, and how far it is ahead of the monotonic one; nanoseconds. Of several readings the one that took
    the least time."""
    best, found = 1 << 62, (0, 0)
    for _ in range(5):
        before = time.monotonic_ns()
        unix = time.clock_gettime_ns(time.CLOCK_REALTIME)
        took = time.monotonic_ns() - before
        if took < best:
            best, found = took, (unix, unix - before - took // 2)
    return found
