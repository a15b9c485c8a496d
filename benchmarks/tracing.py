"""What tracing costs: a step of the engine without a model, with the tracers off and on."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import ClassVar

import msgspec

from benchmarks.harness import Benchmark, Plan, numbers
from benchmarks.null_engine import PLACES
from benchmarks.peers.null_loops import VOCAB_SIZE, Load
from benchmarks.peers.null_ringcore import RingcoreEngine, RingcoreNull
from benchmarks.peers.queue_loops import cpu_s
from benchmarks.peers.rows import facts, forget_garbage
from benchmarks.result import Check, Findings, Measurement
from ringcore.testing.models import write_model_config
from ringcore.tracing import ProcessTrace, Tracer, now_ns
from ringcore.tracing.kinds import CALL_RECEIVED

__all__ = ["Tracing"]

OFF, ON = "ringcore", "traced"
REQUESTS = "1,32,256"
TRACE_S = 600.0
REPEATS = 1_000_000


class Tracing(Benchmark):
    """µs a step of the null engine, tracing off and on; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 15

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", default=REQUESTS, help=f"how many decode at once (default: {REQUESTS})")

    def run(self, plan: Plan) -> Findings:
        sizes = numbers("--requests", plan.options.requests)
        measurements: list[Measurement] = []
        checks = [_cost_of_a_span()]
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            longest = max(Load(size, True).max_model_len for size in sizes)
            write_model_config(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=longest)
            for place, has_process in PLACES.items():
                for size in sizes:
                    with _Loop(folder, Load(size, has_process)) as loop:
                        pairs = [loop.pair(on_first=number % 2 == 0) for number in range(plan.rounds)]
                    name = f"{place}, {size:,} request{'s' * (size > 1)}"
                    for index, kind in enumerate(("wall", "CPU")):
                        samples = {which: [pair[which][index] for pair in pairs] for which in (OFF, ON)}
                        shown = f"{name}, a step, {kind}"
                        measurements.append(Measurement(name=shown, unit="µs", higher_is_better=False, samples=samples))
                        share = median((on - off) / off for off, on in zip(samples[OFF], samples[ON], strict=True))
                        checks.append(Check(name=f"{name}, tracing adds, {kind}", value=f"{share:.1%}", data=share))
                    checks.append(Check(name=f"{name}, records of the engine a step", value=f"{loop.a_step:.1f}"))
        engine = {**facts(RingcoreNull.packages), "env": {}}
        engines = {OFF: engine, ON: engine}
        return Findings(measurements=measurements, engines=engines, conditions=_conditions(), checks=checks)


def _conditions() -> list[str]:
    return [
        "The engines and requests of `null_engine`. Each round runs the same engine once with its tracers off and once "
        "with them on, in alternating order; of an engine in a process of its own the client is traced too. What "
        "tracing adds is the median over the rounds. CPU: of the client's process and of the engine's together.",
        "A tracer that is off costs one attribute check for each span, measured alone: less than what two runs of the "
        "same code differ by.",
    ]


class _Loop(RingcoreNull):
    """One engine, and a run of its requests with tracers off or on."""

    def __init__(self, folder: str, load: Load) -> None:
        super().__init__()
        self.load(folder)
        self._size = load
        self.a_step = 0.0  # records of the engine

    def __enter__(self) -> _Loop:
        self._engine = self.start(self._size)
        for _ in range(2):
            self._run(self._size)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pair(self, on_first: bool) -> dict[str, tuple[float, float]]:
        """Microseconds a step, wall and CPU, off and on."""
        found = {}
        for name in (ON, OFF) if on_first else (OFF, ON):
            forget_garbage()
            if name == OFF:
                found[name] = self._step_us()
                continue
            assert isinstance(self._engine, RingcoreEngine)
            with traced(self._engine) as records:
                found[name] = self._step_us()
            self.a_step = records[0] / self._size.max_tokens
        return found

    def _step_us(self) -> tuple[float, float]:
        assert isinstance(self._engine, RingcoreEngine)
        engine = self._engine.ready.pids["engine"] if self._size.has_process else None

        def used_s() -> float:
            return time.process_time() + (0.0 if engine is None else cpu_s(engine))

        began_s = used_s()
        wall_us = self._run(self._size)
        return wall_us, (used_s() - began_s) * 1e6 / self._size.max_tokens


@contextmanager
def traced(engine: RingcoreEngine) -> Iterator[list[int]]:
    """Traces an engine and its client meanwhile; the number of the engine's records is in the list afterwards."""
    found: list[int] = []
    engine.call("start_trace", TRACE_S)
    yield found
    trace = msgspec.msgpack.decode(engine.call("stop_trace"), type=ProcessTrace)
    assert not trace.is_full
    found.append(len(trace.records))


def _cost_of_a_span() -> Check:
    """Nanoseconds of a check that finds the tracer off, and of a span that is recorded."""
    tracer = Tracer()
    loop_s = _seconds(lambda: [None for _ in range(REPEATS)])

    def off() -> None:
        for _ in range(REPEATS):
            began = tracer.is_on and now_ns()
            if began:
                tracer.record((CALL_RECEIVED.number, began, began, now_ns()))

    off_s = _seconds(off)
    tracer.start(now_ns() + 10**15)
    on_s = _seconds(off)
    value = f"{(off_s - loop_s) / REPEATS * 1e9:.0f} ns off, {(on_s - loop_s) / REPEATS * 1e9:.0f} ns recorded"
    return Check(name="a record of two spans", value=value)


def _seconds(run: object) -> float:
    assert callable(run)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
