"""How long engines take to give a GPU's memory back and to take it again, and how much of it they give."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import msgspec

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu_memory import device_used_bytes, process_used_bytes
from benchmarks.gpu_options import Deadline, add_engine_arguments, bytes_a_number, gpu_specs
from benchmarks.harness import Benchmark, EngineSpec, Plan, interleave, load_engine, note
from benchmarks.models import PublishedModel, find_published
from benchmarks.result import FAILED, Check, Findings, Limit, Measurement
from benchmarks.turns import measurements_from_rows

__all__ = ["GpuSleep"]

CALL_TIMEOUT_S = 180.0
LATER_CYCLES = 5
PAUSE_S = 3.0
PROMPTS = {"batch": 8, "prompt_tokens": 64, "new_tokens": 16}
Rows = list[tuple[str, str, float]]

FIRST_SLEEP, LATER_SLEEPS = "first sleep of level 1", "later sleeps of level 1"
FIRST_WAKE, LATER_WAKES, WAKE_AT_ONCE = "first wake-up", "later wake-ups", "wake-up at once after a sleep"
FREED, FREED_SHARE, FREED_2 = "freed by level 1", "freed of weights and KV cache", "freed by level 2"


class GpuSleep(Benchmark):
    """seconds to sleep and to wake up on a GPU, and the memory that is freed; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 2

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser)
        parser.set_defaults(models="Qwen3-8B")
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        session = _Session(plan)
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            for model in find_published(plan.options.models):
                session.measure(model, model.write(Path(folder)))
        return session.findings()


@dataclass(frozen=True)
class _Taken:
    """Of one process of an engine."""

    rows: Rows
    num_equal: int  # tokens after a sleep that are those before it
    num_tokens: int  # that were compared


class _Session:
    """All models of one run; an engine that fails is out of the rest of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._deadline = plan, Deadline(plan.options.seconds)
        specs = gpu_specs(plan, "gpu", are_together=False)
        self._specs = {spec.name: _that_sleeps(spec) for spec in specs}
        self._copies = _measure_copies(plan.options.device)
        self._engines: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []
        self._checks: list[Check] = []
        self._failures: dict[str, Check] = {}  # by engine

    def measure(self, model: PublishedModel, folder: Path) -> None:
        @cache  # a round has all engines or none
        def has_time(round_: int) -> bool:
            return self._deadline.allows(f"{model.name}, round {round_}")

        def turn(name: str, round_: int) -> _Taken | None:
            if round_ == 0 or name in self._failures or not has_time(round_):
                return None  # nothing has to be warm: each process has its first sleep, and then later ones
            return self._try(name, model, folder, round_)

        taken = interleave(list(self._specs), self._plan.rounds, turn)
        whole = {
            name: [one for one in rounds if one is not None]
            for name, rounds in taken.items()
            if name not in self._failures
        }
        self._add(model, {name: rounds for name, rounds in whole.items() if rounds})

    def _try(self, name: str, model: PublishedModel, folder: Path, round_: int) -> _Taken | None:
        contents = model.num_weights, model.kv_numbers_a_token
        weights_bytes, kv_bytes_a_token = (n * bytes_a_number(self._plan.options.dtype) for n in contents)
        try:
            taken, self._engines[name] = _in_a_process(self._specs[name], folder, weights_bytes, kv_bytes_a_token)
        except BenchmarkError as error:
            note(f"{name} failed, {model.name}: {error.message}")
            first = error.message.splitlines()[0]
            self._failures[name] = Check(name=f"{name}{FAILED}{model.name}", value=first)
            return None
        shown = ", ".join(f"{label} {value:.3g} {unit}" for label, unit, value in taken.rows)
        note(f"{model.name}, round {round_} of {self._plan.rounds}: {name} {shown}")
        return taken

    def _add(self, model: PublishedModel, taken: dict[str, list[_Taken]]) -> None:
        rows = {name: [one.rows for one in rounds] for name, rounds in taken.items()}
        limits = _limits(model.num_weights * bytes_a_number(self._plan.options.dtype), self._copies)
        for one in measurements_from_rows(rows, limits, prefix=f"{model.name}, "):
            is_gain = one.name.rpartition(", ")[2] in (FREED, FREED_SHARE, FREED_2)
            self._measurements.append(msgspec.structs.replace(one, higher_is_better=is_gain))
        for name, rounds in taken.items():
            equal, count = sum(one.num_equal for one in rounds), sum(one.num_tokens for one in rounds)
            label = f"{model.name}, greedy tokens of {name} after sleeps of level 1 equal to those before"
            self._checks.append(Check(name=label, value=f"{equal} of {count}"))
        num_rounds = max(map(len, taken.values()), default=0)
        if 0 < num_rounds < self._plan.rounds:
            label = f"{model.name}, rounds for which there was time"
            self._checks.append(Check(name=label, value=f"{num_rounds} of {self._plan.rounds}"))

    def findings(self) -> Findings:
        if not self._measurements:
            reasons = "; ".join(check.value for check in self._failures.values())
            raise BenchmarkError(f"nothing was measured: {reasons or 'there was no time'}")
        return Findings(
            measurements=self._measurements,
            engines={name: self._engines[name] for name in self._specs if name in self._engines},
            conditions=_conditions(self._plan.options.dtype, next(iter(self._specs.values()))),
            checks=self._checks + list(self._failures.values()),
        )


def _that_sleeps(spec: EngineSpec) -> EngineSpec:
    return replace(spec, settings={**spec.settings, "enable_sleep_mode": True})


def _measure_copies(device: str) -> dict[str, float]:
    """Bytes a second by direction, in a process that ends before any engine starts."""
    note("copies between the device and the host")
    with Driver("ceilings", (sys.executable, "-m", "benchmarks.gpu_ceilings")) as driver:
        rates: dict[str, float] = driver.call("measure_copies", CALL_TIMEOUT_S, device=device)
    return rates


def _limits(weights_bytes: int, copies: dict[str, float]) -> dict[str, Limit]:
    def limit(rate: float, way: str) -> Limit:
        statement = f"copying {weights_bytes / 1e9:.2f} GB of weights to {way} at {rate / 1e9:.1f} GB/s"
        return Limit(value=weights_bytes / rate, statement=statement)

    down, up = limit(copies["to_host"], "pinned host memory"), limit(copies["to_device"], "the device")
    return dict.fromkeys((FIRST_SLEEP, LATER_SLEEPS), down) | dict.fromkeys((FIRST_WAKE, LATER_WAKES, WAKE_AT_ONCE), up)


# ---------------------------------------------------------------------------------------------------------------
# One process of an engine, alone on the device.


def _in_a_process(
    spec: EngineSpec, folder: Path, weights_bytes: int, kv_bytes_a_token: int
) -> tuple[_Taken, dict[str, Any]]:
    """What it took, and the engine's facts."""
    idle_bytes = device_used_bytes()
    with spec.start() as driver:
        facts = load_engine(driver, spec, folder).facts
        contents = weights_bytes + kv_bytes_a_token * driver.call("num_kv_tokens", CALL_TIMEOUT_S)
        return _Sleeper(driver, idle_bytes, contents).measure(), dict(facts)


class _Sleeper:
    """An engine that sleeps and wakes up, and what the driver says of its memory."""

    def __init__(self, driver: Driver, idle_bytes: int | None, contents_bytes: int) -> None:
        """idle_bytes: in use on the device before it came. contents_bytes: of its weights and its KV cache."""
        self._driver, self._idle_bytes, self._contents_bytes = driver, idle_bytes, contents_bytes

    def measure(self) -> _Taken:
        """Cycles of level 1, the last with a wake-up at once, and then one of level 2."""
        before = self._greedy()
        awake_bytes = device_used_bytes()
        rows = [(FIRST_SLEEP, "s", self._sleep(1))]
        memory = self._freed_by_level_1(awake_bytes)
        time.sleep(PAUSE_S)
        first_wake_s, *firsts = self._wake_up()
        num_equal = _num_equal(before, self._greedy())
        later = [self._cycle(PAUSE_S) for _ in range(LATER_CYCLES)]
        at_once = self._cycle(0.0)
        num_equal += _num_equal(before, self._greedy())
        rows += [
            (FIRST_WAKE, "s", first_wake_s),
            (LATER_SLEEPS, "s", median(sleep_s for sleep_s, _, _ in later)),
            (LATER_WAKES, "s", median(wake_s for _, wake_s, _ in later)),
            (WAKE_AT_ONCE, "s", at_once[1]),
            ("first token after a wake-up", "s", median(firsts + [first_s for _, _, first_s in later])),
        ]
        return _Taken(rows + self._level_2() + memory, num_equal, 2 * sum(map(len, before)))

    def _cycle(self, pause_s: float) -> tuple[float, float, float]:
        """Seconds: the sleep, the wake-up, the first token after it."""
        sleep_s = self._sleep(1)
        time.sleep(pause_s)
        wake_s, first_s = self._wake_up()
        return sleep_s, wake_s, first_s

    def _level_2(self) -> Rows:
        """The last: what it leaves of the weights is nothing."""
        awake_bytes = device_used_bytes()
        sleep_s, asleep_bytes = self._sleep(2), device_used_bytes()
        time.sleep(PAUSE_S)
        (wake_s,) = self._driver.call("wake_up", CALL_TIMEOUT_S, then_ask=False)
        rows = [("sleep of level 2", "s", sleep_s), ("wake-up after level 2", "s", wake_s)]
        if awake_bytes is not None and asleep_bytes is not None:
            rows.append((FREED_2, "GB", (awake_bytes - asleep_bytes) / 1e9))
        return rows

    def _freed_by_level_1(self, awake_bytes: int | None) -> Rows:
        """Called while it sleeps. Nothing where the driver does not tell, as on a CPU."""
        asleep_bytes = device_used_bytes()
        rows = []
        if awake_bytes is not None and asleep_bytes is not None and self._idle_bytes is not None:
            freed = awake_bytes - asleep_bytes
            rows = [(FREED, "GB", freed / 1e9), (FREED_SHARE, "%", 100 * freed / self._contents_bytes)]
            rows.append(("left on the device by level 1", "GB", (asleep_bytes - self._idle_bytes) / 1e9))
        own_bytes = process_used_bytes([process.pid for process in self._driver.processes()])
        if own_bytes is not None:
            rows.append(("left to its processes by level 1", "GB", own_bytes / 1e9))
        return rows

    def _sleep(self, level: int) -> float:
        seconds = float(self._driver.call("sleep", CALL_TIMEOUT_S, level=level))
        self._note_parts(f"sleep of level {level}")
        return seconds

    def _wake_up(self) -> list[float]:
        seconds: list[float] = self._driver.call("wake_up", CALL_TIMEOUT_S, then_ask=True)
        self._note_parts("wake-up")
        return seconds

    def _note_parts(self, call: str) -> None:
        """To the log: where the seconds went."""
        parts: dict[str, float] = self._driver.call("memory_parts", CALL_TIMEOUT_S)
        if parts:
            note(f"{call}: " + ", ".join(f"{name} {value:.4g}" for name, value in parts.items()))

    def _greedy(self) -> list[list[int]]:
        tokens: list[list[int]] = self._driver.call("greedy", CALL_TIMEOUT_S, **PROMPTS)
        return tokens


def _num_equal(before: list[list[int]], after: list[list[int]]) -> int:
    pairs = [pair for one, other in zip(before, after, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs)


def _conditions(dtype: str, spec: EngineSpec) -> list[str]:
    share = spec.settings["memory_share"]
    return [
        f"Random weights in {dtype}; {share:.0%} of the device's memory, sleep mode on, all else the engine's default. "
        "Every round a new process of each engine, one after the other, alone on the machine.",
        f"Seconds are those of the engine's call in its front end. A wake-up follows its sleep after {PAUSE_S:.0f} s, "
        "since a driver clears released memory in the background, but for the one at once. Later ones: the median of "
        f"{LATER_CYCLES} in the process. A first token: a request of 16 tokens right after the wake-up.",
        "Freed: what the driver says is in use on the device, before and after. Left on it: what is more in use than "
        "before the engine was started; to its processes: by the driver's list of them, where it knows them.",
        f"Greedy tokens: {PROMPTS['batch']} prompts of {PROMPTS['prompt_tokens']} tokens, {PROMPTS['new_tokens']} new "
        "ones each, after the first wake-up and after the one at once.",
    ]
