"""What it costs an engine that operators can ask it: each step, each answer, and `ringcore top` once a second."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from statistics import median
from typing import Any, ClassVar

from benchmarks.harness import Benchmark, Plan, numbers
from benchmarks.peers.null_loops import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, PROMPT_TOKENS, VOCAB_SIZE, Load
from benchmarks.peers.null_ringcore import RingcoreEngine
from benchmarks.peers.rows import facts, forget_garbage
from benchmarks.result import Check, Findings, Measurement
from ringcore.cli.engines import choose_engine
from ringcore.cli.top.source import AdminSource
from ringcore.config import EngineConfig
from ringcore.engine_core.admin.step_times import BATCH, StepTimes
from ringcore.engine_core.core import EngineCore
from ringcore.engine_core.step_observer import StepObserver
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import NO_STATS, EngineCoreRequest
from ringcore.protocol.steps import SchedulerOutput
from ringcore.testing.models import write_model_config
from ringcore.tracing.kinds import STEP

__all__ = ["Introspection", "bookkeeping_us"]

REQUESTS = "1,32,256"
OURS, ASKED = "ringcore", "ringcore asked once a second"
NUM_NOTES = 100_000
NUM_BATCHES = 25


class Introspection(Benchmark):
    """what a step, an answer and `ringcore top` cost an engine without a model; needs no model"""

    needs_model: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", default=REQUESTS, help=f"how many decode at once (default: {REQUESTS})")
        parser.add_argument("--seconds", type=float, default=4.0, help="of a lap at least (default: 4)")

    def run(self, plan: Plan) -> Findings:
        sizes = numbers("--requests", plan.options.requests)
        measurements, checks = [], []
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            longest = max(Load(size, True).max_model_len for size in sizes)
            write_model_config(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=longest)
            noted = [bookkeeping_us() for _ in range(plan.rounds)]
            measurements.append(_measurement("a step's bookkeeping", "µs", {OURS: noted}))
            for size in sizes:
                steps = _steps(folder, size, plan.rounds, plan.options.seconds)
                shown = f"{size:,} request{'s' * (size > 1)}"
                measurements.append(_measurement(f"{shown}, a step", "µs", steps))
                share = median(noted) / median(steps[OURS])
                checks.append(Check(name=f"{shown}, bookkeeping of a step", value=f"{share:.2%}", data=share))
                answers = _answers(folder, size, plan.rounds)
                measurements.append(_measurement(f"{shown}, a snapshot", "µs", {OURS: answers}))
        engines = {
            name: dict(facts(("ringcore", "msgspec", "numpy"), construct_s=0.0)) | {"env": {}} for name in (OURS, ASKED)
        }
        return Findings(measurements=measurements, engines=engines, conditions=_conditions(plan), checks=checks)


def _conditions(plan: Plan) -> list[str]:
    return [
        "The bookkeeping is what each step does so that operators can ask later: readings of the clock, an "
        f"entry in a ring, and the time of sending; timed by itself, {NUM_NOTES:,} times, of which the least disturbed "
        "batch counts. A check gives its share of a step.",
        "A step is that of the null engine in a process of its own, with its client: the wall time from the arrival of "
        f"the requests to their last token over the steps; laps of {plan.options.seconds:.0f} s at least, in which the "
        "engine is asked, in turn with laps in which it is not, by the calls of `ringcore top`, in a thread of the "
        "client's process.",
        "A snapshot is the answer of an engine in this process, with 50 requests and 1,024 cells, not encoded.",
    ]


def _measurement(name: str, unit: str, samples: dict[str, list[float]]) -> Measurement:
    return Measurement(name=name, unit=unit, higher_is_better=False, samples=samples)


def bookkeeping_us(num_notes: int = NUM_NOTES) -> float:
    """Microseconds: what a step does for operators alone, as `steps_in_flight` and `loop` do it."""
    times, clock, observers, num = StepTimes(), time.monotonic, list[StepObserver](), count(1)
    step = SchedulerOutput(0, 1, int_array(), [], [], None, None, 32)
    columns = output_columns([], NO_STATS)
    tokens, number = columns.token_ids, STEP.number

    def note() -> None:
        began_s, scheduled_s, launched_s = clock(), clock(), clock()
        rows, facts = 32 if step.rows is None else len(step.rows), columns.stats
        record = (
            number,
            began_s,
            scheduled_s,
            launched_s,
            began_s,
            clock(),
            step.step,
            step.num_tokens,
            facts.step,
            len(tokens),
            rows,
            step.num_steps,
        )
        times.record(record)
        if not next(num) % BATCH:
            times.end_batch()
        for observer in observers:
            observer.completed(record, columns)
        sending_s, sent_s = clock(), clock()
        times.record_send(sent_s - sending_s)
        for observer in observers:
            observer.sent(sending_s, sent_s)

    return _us_of(note, num_notes) - _us_of(lambda: None, num_notes)


def _us_of(function: Callable[[], object], num: int) -> float:
    """Of the least disturbed of some batches."""
    batches = [_batch_us(function, max(1, num // NUM_BATCHES)) for _ in range(NUM_BATCHES)]
    return min(batches)


def _batch_us(function: Callable[[], object], num: int) -> float:
    began_s = time.perf_counter()
    for _ in range(num):
        function()
    return (time.perf_counter() - began_s) * 1e6 / num


def _config(folder: str, load: Load) -> EngineConfig:
    options: dict[str, Any] = {"model": folder, "load_format": "dummy", "block_size": BLOCK_SIZE}
    options |= {"executor": "benchmarks.peers.ringcore_null_executor:NullExecutor", "steps_in_flight": 2}
    options |= {"num_blocks_override": load.num_blocks + 1, "max_num_seqs": load.num_requests}
    options |= {"max_model_len": load.max_model_len, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    return EngineConfig.from_options(**options)


def _steps(folder: str, size: int, rounds: int, lap_s: float) -> dict[str, list[float]]:
    """Microseconds a step, unasked and asked in turn."""
    load = Load(size, True)
    engine = RingcoreEngine(_config(folder, load), has_process=True)
    try:
        pid = engine.ready.pids["engine"]
        _lap(engine, load, 0.0)
        found: dict[str, list[float]] = {OURS: [], ASKED: []}
        for number in range(rounds):
            kinds = (OURS, ASKED) if number % 2 else (ASKED, OURS)
            for kind in kinds:
                with _Asking(pid) if kind == ASKED else nullcontext():
                    found[kind].append(_lap(engine, load, lap_s))
        return found
    finally:
        engine.close()


def _lap(engine: RingcoreEngine, load: Load, at_least_s: float) -> float:
    forget_garbage()
    began_s, num_steps = time.perf_counter(), 0
    while num_steps == 0 or time.perf_counter() - began_s < at_least_s:
        engine.add(_prompts(load.num_requests), load.max_tokens)
        num_tokens = 0
        while num_tokens < load.num_requests * load.max_tokens:
            num_tokens += engine.get()
        num_steps += load.max_tokens
    return (time.perf_counter() - began_s) * 1e6 / num_steps


def _prompts(num: int) -> list[list[int]]:
    return [[index % VOCAB_SIZE, *range(PROMPT_TOKENS - 1)] for index in range(num)]


class _Asking:
    """Samples an engine once a second while it is entered."""

    def __init__(self, pid: int) -> None:
        self._source = AdminSource(choose_engine(str(pid), None))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._source.sample()
            self._stopping.wait(1.0)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._source.close()


def _answers(folder: str, size: int, rounds: int) -> list[float]:
    """Microseconds of a snapshot."""
    load = Load(size, False)
    with EngineCore(_config(folder, load)) as core:
        params = SamplingParams(temperature=0, max_tokens=load.max_tokens, ignore_eos=True)
        for index, prompt in enumerate(_prompts(size)):
            core.add_request(EngineCoreRequest(f"request-{index}", prompt, params, arrival_s=0.0))
        for _ in range(min(200, load.max_tokens // 2)):
            core.step()
        snapshot = core.engine_call("snapshot")
        return [_us_of(lambda: snapshot(50, 1024), NUM_BATCHES) for _ in range(rounds)]
