"""ringcore's message queue beside vLLM's: latency, rate, CPU, and how soon a death is an error."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.harness import Benchmark, EngineSpec, Plan, child_specs, load_engine, note, numbers
from benchmarks.peers.queue_loops import FAR, IDLE_S, NUM_PACED, SILENCE_S, SIZES, WORK_S, cpu_s, pinned_core, size_name
from benchmarks.result import Check, Findings, Limit, Measurement
from benchmarks.turns import measurements_from_rows
from ringcore.config import ParallelConfig

__all__ = ["MessageQueue", "OtherWork", "Round", "floors", "limits_from", "measurements", "queue_specs", "quietest"]

TRANSPORTS = {"memfd": ("", ""), "zmq": ("", " by zmq"), FAR: ("far ", "")}  # in a row's name
OURS, EXECUTOR = "ringcore", "ringcore executor"  # the latter's rows stand in our own column
QUIET_CORES = 0.15  # a round in which anything else took more of a core counts only for want of others
EXTRA_ROUNDS = 0.5  # of the counted ones: how many more may be run to get quiet ones
SETTLE_S, SETTLED_CORES, LOOK_S = 3.0, 0.3, 0.1
TIMEOUT_S = 600.0  # of one block, on a machine that is busy
NUM_COPIES, NUM_WAKES = 50, 100

_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with its parent
_COUNTERPART = """
import os, sys
asked, answered, parent = *map(int, sys.argv[1:]), os.getppid()
while os.getppid() == parent:
    os.eventfd_read(asked)
    os.eventfd_write(answered, 1)
"""


class MessageQueue(Benchmark):
    """round trips over the message queue, their CPU, and the error after a death; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 12

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--readers", default="1,2", help="numbers of readers, one part each (default: 1,2)")
        parser.add_argument(
            "--transport",
            default="memfd",
            help="how readers are reached, one part each: memfd and zmq carry large messages on this host, far all of "
            "them over TCP and CurveZMQ (default: memfd)",
        )
        parser.add_argument(
            "--call-ring-bytes",
            type=int,
            default=ParallelConfig().call_ring_bytes,
            help="of ringcore's ring to the readers: messages above half of it go beside it (default: the engine's)",
        )
        parser.add_argument("--pin", action="store_true", help="the writer on the first core, readers on the others")
        parser.add_argument("--quick", action="store_true", help="a fiftieth of the work, to try the benchmark itself")

    def run(self, plan: Plan) -> Findings:
        counts = numbers("--readers", plan.options.readers)
        parts = [_Part(plan, count, one) for one in _transports(plan.options.transport) for count in counts]
        for part in parts:
            part.run()
        return Findings(
            measurements=[measurement for part in parts for measurement in part.measurements],
            engines=parts[-1].facts,
            conditions=_conditions(plan),
            checks=[check for part in parts for check in part.checks],
        )


def _transports(given: str) -> list[str]:
    """Raises `BenchmarkError` for one that there is not."""
    found = given.split(",")
    for one in found:
        if one not in TRANSPORTS:
            raise BenchmarkError(f"--transport {one}: give of {', '.join(TRANSPORTS)}", transport=one)
    return found


def _conditions(plan: Plan) -> list[str]:
    counts = ", ".join(f"{count} of {size_name(size)}" for size, count in SIZES.items())
    said = [
        "A round trip: the payload to every reader, which looks at its number, size and last byte where it lies, and a "
        "small reply from each. Up to 4 KiB it is bytes, above a numpy array.",
        f"A sample is the p50 or p99 of a block of round trips ({counts}); a fifth of them while a process that does "
        "nothing but count has a core.",
        f"Paced: {NUM_PACED} times {WORK_S * 1e3:.0f} ms of work (sleep) and as long a pause. Idle: {IDLE_S:.0f} s. "
        "CPU below 0.001% of a core counts as that.",
        "collective_rpc: the whole executor, every argument decoded and copied out; the long call takes 5 s.",
        "All transports but the one whose turn it is are stopped, except far ones; in every round each has a turn, in "
        "random order.",
        f"ringcore's ring to the readers has {plan.options.call_ring_bytes >> 20} MiB; above half goes beside it.",
        f"Placement: {'the writer on one core, readers on the others' if plan.options.pin else 'free'}.",
    ]
    return said + (["--quick: these figures mean nothing."] if plan.options.quick else [])


def queue_specs(specs: Iterable[EngineSpec], settings: Mapping[str, Any]) -> list[EngineSpec]:
    """The queues of the engines that take part, then ringcore's executor, except with far readers, which are hosts.
    Raises `BenchmarkError` for one without."""
    queues = child_specs(specs, "queue", "message queue", settings)  # vLLM's queue has no modes
    if settings["transport"] == FAR:
        return queues
    command = (queues[0].python, "-m", "benchmarks.peers.queue_executor")
    return [*queues, EngineSpec(EXECUTOR, command, "", settings=settings)]


@dataclass
class Round:
    """Each transport measured once."""

    rows: dict[str, list[Sequence[Any]]] = field(default_factory=dict)  # transport -> [name, unit, value]
    other_cores: float = 0.0  # the most that anything else took while one of them was measured


class _Part:
    """All rounds with one number of readers and one transport."""

    def __init__(self, plan: Plan, num_readers: int, transport: str) -> None:
        self._plan = plan
        kind, how = TRANSPORTS[transport]
        self._prefix = f"{num_readers} {kind}reader{'s' * (num_readers > 1)}{how}, "
        self._is_far = transport == FAR
        settings = {
            "readers": num_readers,
            "transport": transport,
            "call_ring_bytes": plan.options.call_ring_bytes,
            "pin": plan.options.pin,
            "quick": plan.options.quick,
        }
        self._specs = queue_specs(plan.specs, settings)
        self._drivers: dict[str, Driver] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.measurements: list[Measurement] = []
        self.checks: list[Check] = []

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            for spec in self._specs:
                driver = self._drivers[spec.name] = stack.enter_context(spec.start())
                facts = load_engine(driver, spec, self._plan.model).facts
                if not self._is_far:
                    driver.pause()
                if spec.name != EXECUTOR:
                    self.facts[spec.name] = facts
            before = floors(self._plan.options.pin)
            counted = self._rounds()
            limits = limits_from(before, floors(self._plan.options.pin))
            found = [*measurements([spec.name for spec in self._specs], counted, limits), self._deaths()]
        self.measurements = [msgspec.structs.replace(one, name=self._prefix + one.name) for one in found]

    def _rounds(self) -> list[Round]:
        """As many as are counted: quiet ones, as far as there are enough."""
        wanted, rounds, num_quiet = self._plan.rounds, list[Round](), 0
        while num_quiet < wanted and len(rounds) < wanted + int(wanted * EXTRA_ROUNDS):
            rounds.append(self._round(seed=len(rounds)))
            num_quiet += rounds[-1].other_cores < QUIET_CORES
            note(f"{self._prefix}round {len(rounds)}: other work took up to {rounds[-1].other_cores:.2f} cores")
        counted = quietest(rounds, wanted)
        most = max(round_.other_cores for round_ in counted)
        value = f"{num_quiet} of {wanted} (other work took at most {most:.2f} cores in any; {len(rounds)} were run)"
        self.checks.append(Check(name=f"{self._prefix}quiet rounds", value=value))
        return counted

    def _round(self, seed: int) -> Round:
        turns = list(self._drivers)
        random.Random(seed).shuffle(turns)
        round_ = Round()
        for name in turns:
            for is_stolen in (False,) if name == EXECUTOR else (False, True):
                _settle()
                with self._running(name), self._thief(is_stolen) as thief:
                    pids = [process.pid for process in self._drivers[name].processes()]
                    others = OtherWork([os.getpid(), *thief, *pids])
                    rows = self._drivers[name].call("block", TIMEOUT_S, stolen=is_stolen)
                    round_.other_cores = max(round_.other_cores, others.cores())
                round_.rows.setdefault(name, []).extend(rows)
        return round_

    def _running(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Far readers are never stopped: a host that does not answer is dead."""
        return contextlib.nullcontext() if self._is_far else self._drivers[name].running()

    @contextlib.contextmanager
    def _thief(self, is_wanted: bool) -> Iterator[list[int]]:
        """The process id of one that takes a whole core: with --pin that of the first reader."""
        if not is_wanted:
            yield []
            return
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", _BUSY]) as thief:
            try:
                if self._plan.options.pin:
                    os.sched_setaffinity(thief.pid, {pinned_core(0, sorted(os.sched_getaffinity(0)))})
                time.sleep(LOOK_S)  # by now it counts
                yield [thief.pid]
            finally:
                thief.kill()

    def _deaths(self) -> Measurement:
        """Of every engine whose writer notices at all."""
        samples: dict[str, list[float]] = {}
        for name in self.facts:
            with self._running(name):
                taken = [self._drivers[name].call("death", TIMEOUT_S)]
                while taken[0] is not None and len(taken) < self._plan.rounds:
                    taken.append(self._drivers[name].call("death", TIMEOUT_S))
            if taken[0] is None:
                what = f"{self._prefix}error of the writer of {name} after the death of a reader"
                self.checks.append(Check(name=what, value="none within 1 s, by the queue alone"))
            else:
                samples[name] = taken
        name = "death of a reader to the writer's error"
        return Measurement(name=name, unit="ms", higher_is_better=False, samples=samples)


def quietest(rounds: Sequence[Round], count: int) -> list[Round]:
    """The `count` rounds that other work disturbed least, all quiet ones alike, in the order in which they were run."""
    ranked = sorted(range(len(rounds)), key=lambda i: max(rounds[i].other_cores, QUIET_CORES))
    return [rounds[i] for i in sorted(ranked[:count])]


def measurements(names: Sequence[str], rounds: Sequence[Round], limits: Mapping[str, Limit]) -> list[Measurement]:
    """A measurement for each kind of row, in the order of the transports `names`."""
    taken: dict[str, list[list[Sequence[Any]]]] = {}
    for name in names:
        column, prefix = (OURS, "collective_rpc, ") if name == EXECUTOR else (name, "")
        rows: list[list[Sequence[Any]]]
        rows = [[[prefix + row, unit, value] for row, unit, value in round_.rows[name]] for round_ in rounds]
        taken.setdefault(column, []).extend(rows)
    return measurements_from_rows(taken, limits)


def limits_from(*measured: Mapping[str, float]) -> dict[str, Limit]:
    """The least time of a row, by the row's name. Of several `floors` the best counts."""
    least = {name: min(floor[name] for floor in measured) for name in measured[0]}
    wake_us, late_us = least.pop("wake"), least.pop("late")
    limits = {}
    for size in SIZES:
        if (copy_us := least[size_name(size)]) > 1:  # what is less drowns in the cost of any call at all
            copied = f"copying {size_name(size)} once at {size / copy_us / 1e3:.1f} GB/s"
            limits[f"{size_name(size)}, p50"] = Limit(value=copy_us, statement=copied)
    woken = f"one wake-up of {wake_us:.1f} µs"
    limits[f"after {SILENCE_S} s of silence"] = Limit(value=wake_us, statement=woken)
    both = f"two wake-ups of {wake_us:.1f} µs, and the {late_us:.0f} µs by which a sleep as long as the work is late"
    limits["paced, over the work"] = Limit(value=2 * wake_us + late_us, statement=both)
    return limits


def floors(pin: bool) -> dict[str, float]:
    """Microseconds: copying each size once, "wake" of a process that sleeps, "late" of a sleep of `WORK_S`."""
    measured = {}
    for size in SIZES:
        source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        target = np.empty_like(source)
        measured[size_name(size)] = min(_us(np.copyto, target, source) for _ in range(NUM_COPIES))
    measured["late"] = median(_us(time.sleep, WORK_S) for _ in range(NUM_WAKES)) - WORK_S * 1e6
    return measured | {"wake": _wake_us(pin)}


def _wake_us(pin: bool) -> float:
    """Half a round trip between two processes that sleep; with pauses, in which their cores sleep, too."""
    asked, answered = os.eventfd(0), os.eventfd(0)
    command, cores = [sys.executable, "-c", _COUNTERPART, str(asked), str(answered)], sorted(os.sched_getaffinity(0))

    def round_trip() -> None:
        os.eventfd_write(asked, 1)
        os.eventfd_read(answered)

    with subprocess.Popen(command, pass_fds=(asked, answered)) as counterpart:
        try:
            if pin:
                os.sched_setaffinity(counterpart.pid, {pinned_core(0, cores)})
                os.sched_setaffinity(0, cores[:1])
            round_trip()  # it has started
            taken_us = []
            for _ in range(NUM_WAKES):
                time.sleep(WORK_S)
                taken_us.append(_us(round_trip))
            return median(taken_us) / 2
        finally:
            os.sched_setaffinity(0, cores)
            counterpart.kill()
            os.close(asked)
            os.close(answered)


def _us(action: Callable[..., object], *arguments: Any) -> float:
    began_s = time.perf_counter()
    action(*arguments)
    return (time.perf_counter() - began_s) * 1e6


class OtherWork:
    """How many cores anything but these processes takes from now on, what the hypervisor steals included."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began_s, self._before_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        return max(0.0, (self._others_s() - self._before_s) / (time.monotonic() - self._began_s))

    def _others_s(self) -> float:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy_s - sum(map(cpu_s, self._pids))


def _settle() -> None:
    """Gives other work a moment to end; nothing of ours runs meanwhile."""
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        others = OtherWork([os.getpid()])
        time.sleep(LOOK_S)
        if others.cores() < SETTLED_CORES:
            return
