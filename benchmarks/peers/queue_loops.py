"""The round trips that every transport is measured with, and their rows.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import math
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.protocol import package_versions, serve

__all__ = ["FAR", "SIZES", "Caller", "Row", "cpu_s", "look", "percentiles", "pinned_core", "run", "size_name"]

Row = tuple[str, str, float]  # name, unit, value

SIZES = {64: 500, 4 << 10: 500, 256 << 10: 300, 4 << 20: 100, 20 << 20: 100}  # bytes -> round trips in a block
MAX_BYTES_OBJECT = 4 << 10  # payloads up to this size are bytes, larger ones numpy arrays
NUM_PACED, WORK_S, SILENCE_S, IDLE_S = 20, 5e-3, 1.5, 5.0
QUICK, STOLEN_SHARE = 0.02, 0.2  # of the work: to try the benchmark, and while a core is stolen
LEAST_CPU = 1e-3  # percent of a core: what is below counts as this, so that ratios exist

FAR = "far"  # the transport of readers on other hosts; those of near ones are named by `large_messages`
LOOK, WORK = 1, 2  # what a message asks of a reader
_NUMBERS = (int, float, type(None))


class Caller(ABC):
    """Something that can ask readers and gather their answers: its process, its commands and the loops."""

    packages: ClassVar[tuple[str, ...]]
    _settings: Mapping[str, Any]

    def __init__(self) -> None:
        self._sequence = 0
        random = np.random.default_rng(0)
        self._arrays = {size: random.integers(0, 256, size, np.uint8) for size in SIZES if size > MAX_BYTES_OBJECT}

    @abstractmethod
    def start(self) -> None:
        """Starts as many readers as the settings say."""

    @abstractmethod
    def ask(self, op: int, argument: Any) -> list[Any]:
        """Sends a message to all readers; the reply of each."""

    @abstractmethod
    def more(self) -> list[Row]:
        """The figures that only this kind has."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The readers' processes."""

    @abstractmethod
    def close(self) -> None:
        """Ends the readers. Idempotent."""

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self.load, "block": self.block}

    def versions(self) -> dict[str, str]:
        return package_versions(self.packages)

    def load(self, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the readers, and makes everything as warm as it gets. `model` is not needed."""
        self._settings, self._scale = settings, QUICK if settings["quick"] else 1.0
        began_s = time.perf_counter()
        self.start()
        for size in SIZES:
            self._trips(size, 12)
        took = {"import_s": 0.0, "construct_s": time.perf_counter() - began_s}
        return took | {"python": platform.python_version(), "packages": self.versions()}

    def block(self, stolen: bool) -> list[Row]:
        """Every figure once; some, and of fewer round trips, while a core is stolen."""
        share = self._scale * (STOLEN_SHARE if stolen else 1.0)
        rows = [row for size, count in SIZES.items() for row in self._trips(size, max(2, int(count * share)))]
        rows += self._paced(max(2, int(NUM_PACED * self._scale))) + self._cold(SILENCE_S * self._scale)
        if stolen:
            return [(f"a core stolen, {name}", unit, value) for name, unit, value in rows if "CPU" not in name]
        return rows + self._slow(max(2, int(100 * self._scale))) + self._idle(IDLE_S * self._scale) + self.more()

    def _trip(self, size: int) -> float:
        """Microseconds of a round trip; every reader must have seen this very payload, to its last byte."""
        self._sequence += 1
        start, end = self._sequence.to_bytes(8, "little"), self._sequence & 255
        payload: Any
        if size > MAX_BYTES_OBJECT:
            payload = self._arrays[size]
            payload[:8], payload[-1] = np.frombuffer(start, np.uint8), end
        else:
            payload = start + bytes(size - 9) + bytes([end])
        began_s = time.perf_counter()
        replies = self.ask(LOOK, payload)
        took_s = time.perf_counter() - began_s
        if any(reply != [self._sequence, size, end] for reply in replies):
            raise RuntimeError(f"message {self._sequence} of {size} bytes was sent; the readers saw {replies}")
        return took_s * 1e6

    def _trips(self, size: int, count: int) -> list[Row]:
        for _ in range(5):
            self._trip(size)
        return percentiles(size_name(size), "µs", [self._trip(size) for _ in range(count)])

    def _paced(self, count: int) -> list[Row]:
        """What steps of an engine look like: the readers work, the writer waits; then the other way round."""
        over_us = []
        with self._cpu("paced") as rows:
            for _ in range(count):
                began_s = time.perf_counter()
                self.ask(WORK, WORK_S)
                over_us.append((time.perf_counter() - began_s - WORK_S) * 1e6)
                time.sleep(WORK_S)
        return [("paced, over the work", "µs", median(over_us)), *rows]

    def _cold(self, seconds: float) -> list[Row]:
        self._trip(64)
        time.sleep(seconds)
        return [(f"after {SILENCE_S} s of silence", "µs", self._trip(64))]

    def _slow(self, count: int) -> list[Row]:
        with self._cpu("100 messages/s") as rows:
            due_s = time.perf_counter()
            for _ in range(count):
                self._trip(64)
                due_s += 0.01
                time.sleep(max(0.0, due_s - time.perf_counter()))
        return rows

    def _idle(self, seconds: float) -> list[Row]:
        self._trip(64)
        with self._cpu(f"idle for {IDLE_S:.0f} s") as rows:
            time.sleep(seconds)
        return rows

    @contextmanager
    def _cpu(self, name: str) -> Iterator[list[Row]]:
        """Rows with the CPU of the writer and, on average, of a reader; they are there when the block has ended."""
        pids, rows = [os.getpid(), *self.pids()], list[Row]()
        began_s, before_s = time.perf_counter(), [cpu_s(pid) for pid in pids]
        yield rows
        took_s = time.perf_counter() - began_s
        used = [100 * (cpu_s(pid) - was_s) / took_s for pid, was_s in zip(pids, before_s, strict=True)]
        rows.append((f"{name}, CPU of the writer", "% of a core", max(LEAST_CPU, used[0])))
        rows.append((f"{name}, CPU of a reader", "% of a core", max(LEAST_CPU, sum(used[1:]) / len(used[1:]))))


def run(caller: Caller) -> None:
    """Serves its commands until the parent says quit or is gone."""
    try:
        serve(caller.commands())
    finally:
        caller.close()


def look(argument: Any) -> Any:
    """A payload's sequence number, size and last byte; anything else as it is."""
    if isinstance(argument, _NUMBERS):
        return argument
    with memoryview(argument) as view:
        return [int.from_bytes(view[:8], "little"), len(view), view[-1]]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process with all its threads, to the nanosecond. Raises `OSError` where it has ended."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux's number for the CPU clock of another process


def percentiles(name: str, unit: str, samples: Sequence[float]) -> list[Row]:
    ordered = sorted(samples)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return [(f"{name}, p50", unit, median(ordered)), (f"{name}, p99", unit, p99)]


def size_name(size: int) -> str:
    bits, unit = next(((bits, unit) for bits, unit in ((20, "MiB"), (10, "KiB")) if size >> bits), (0, "B"))
    return f"{size >> bits} {unit}"


def pinned_core(index: int, cores: Sequence[int]) -> int:
    """The core of reader `index`: they share all but the first, which is the writer's, where there are others."""
    return cores[1 + index % (len(cores) - 1)] if len(cores) > 1 else cores[0]
