"""What an engine costs before and beside its model: import time, and the resident memory of each of its processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.driver import ROOT, BenchmarkError, Driver
from benchmarks.harness import GENERATE_TIMEOUT_S, Benchmark, EngineSpec, Plan, generate, interleave, load_engine, note
from benchmarks.prompts import PromptStream
from benchmarks.result import Check, Findings, Measurement

__all__ = ["Footprint", "ImportCost", "import_cost", "merge_peaks", "process_memory"]

MB = 1e6
POLL_S = 0.1
IMPORT_TIMEOUT_S = 120.0
TOTAL = "all processes"
Memory = dict[str, float]  # name of a row -> MB

_TIME_IMPORT = """
import sys, time
began_s = time.perf_counter()
{statement}
seconds = time.perf_counter() - began_s
import json
print(json.dumps({{"seconds": seconds, "loads_torch": "torch" in sys.modules}}))
"""


@dataclass(frozen=True)
class ImportCost:
    seconds: float
    loads_torch: bool


class Footprint(Benchmark):
    """seconds to import, and resident memory of each process, idle and at work"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--batch", type=int, default=16, help="prompts at once while at work (default: 16)")
        parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each prompt (default: 64)")

    def __init__(self) -> None:
        self._engines: dict[str, dict[str, Any]] = {}
        self._loads_torch: set[str] = set()  # engines whose imports bring torch in
        self._mapped: dict[str, list[str]] = {}  # engine -> those of its roles whose process has torch mapped

    def run(self, plan: Plan) -> Findings:
        imports = self._measure_imports(plan)
        specs = {spec.name: spec for spec in plan.specs}
        memory = interleave(
            plan.names, plan.rounds, lambda name, round_: self._measure_memory(specs[name], plan, round_)
        )
        return Findings(
            measurements=imports + memory_rows(memory),
            engines=self._engines,
            conditions=[
                f"Memory: {plan.model.name} in float32, {plan.options.batch} prompts of about eight tokens, "
                f"{plan.options.new_tokens} new tokens each; a fresh process for every sample, nothing beside it.",
                "One process: resident set (RSS). All processes: proportional set (PSS), a shared page counted once. "
                "Idle is after one request of one token, at work the highest of ten looks a second.",
            ],
            checks=[self._imports_check(), *self._mapped_checks()],
        )

    def _measure_imports(self, plan: Plan) -> list[Measurement]:
        package = {plan.names[0]: (sys.executable, "import ringcore")}
        scripts = {spec.name: (spec.python, spec.import_statement) for spec in plan.specs}
        return [
            self._import_row("import of the package", package, plan.rounds),
            self._import_row("imports of a script", scripts, plan.rounds),
        ]

    def _import_row(self, name: str, subjects: Mapping[str, tuple[str, str]], rounds: int) -> Measurement:
        costs = interleave(list(subjects), rounds, lambda engine, round_: import_cost(*subjects[engine]))
        self._loads_torch |= {engine for engine, taken in costs.items() if any(cost.loads_torch for cost in taken)}
        samples = {engine: [cost.seconds for cost in taken] for engine, taken in costs.items()}
        return Measurement(name=name, unit="s", higher_is_better=False, samples=samples)

    def _imports_check(self) -> Check:
        loading = sorted(self._loads_torch)
        return Check(name="imports that load torch", value=", ".join(loading) or "none", data=loading)

    def _mapped_checks(self) -> list[Check]:
        return [
            Check(name=f"processes of {engine} with torch loaded", value=", ".join(mapped) or "none", data=mapped)
            for engine, mapped in self._mapped.items()
        ]

    def _measure_memory(self, spec: EngineSpec, plan: Plan, round_: int) -> Memory:
        """One fresh engine, idle and then at work."""
        prompts = PromptStream(seed=round_).take(plan.options.batch + 1)
        with spec.start() as driver:
            self._engines[spec.name] = load_engine(driver, spec, plan.model).facts
            generate(driver, prompts[:1], 1)
            pids = driver.call("pids", timeout_s=60.0)
            idle = look(driver, pids)
            driver.send("generate", GENERATE_TIMEOUT_S, prompts=prompts[1:], max_tokens=plan.options.new_tokens)
            peak = idle
            while not driver.replied(POLL_S):
                peak = merge_peaks(peak, look(driver, pids))
            driver.receive()
            if pids:
                self._mapped[spec.name] = [role for role, pid in pids.items() if _has_mapped(pid, "libtorch")]
        note(f"round {round_} of {plan.rounds}: {spec.name} {idle[TOTAL]:.0f} MB idle, {peak[TOTAL]:.0f} MB at work")
        return {f"{row}, idle": v for row, v in idle.items()} | {f"{row}, at work": v for row, v in peak.items()}


def import_cost(python: str, statement: str, env: Mapping[str, str] | None = None) -> ImportCost:
    """What `statement` costs in a fresh interpreter whose environment is this process's with `env` laid over it.

    Raises `BenchmarkError` if it fails.
    """
    command = [python, "-c", _TIME_IMPORT.format(statement=statement)]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": IMPORT_TIMEOUT_S}
    try:
        done = subprocess.run(command, env=os.environ | dict(env or {}), **options)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{statement!r} took more than {IMPORT_TIMEOUT_S:.0f} s", statement=statement) from error
    if done.returncode:
        raise BenchmarkError(f"{statement!r} failed:\n{done.stderr[-2000:]}", statement=statement)
    return ImportCost(**json.loads(done.stdout.splitlines()[-1]))  # a library may print lines of its own before


def look(driver: Driver, pids: Mapping[str, int]) -> Memory:
    """Resident MB of each role, and proportional MB of all the driver's processes together."""
    roles = {role: process_memory(pid)["Rss"] / MB for role, pid in pids.items()}
    return roles | {TOTAL: sum(process_memory(process.pid)["Pss"] for process in driver.processes()) / MB}


def process_memory(pid: int) -> dict[str, int]:
    """Bytes by name (Rss, Pss, ...) of a process's memory; all zero once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return {"Rss": 0, "Pss": 0}
    return {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}


def merge_peaks(a: Memory, b: Memory) -> Memory:
    return {row: max(value, b[row]) for row, value in a.items()}


def memory_rows(memory: Mapping[str, list[Memory]]) -> list[Measurement]:
    """One measurement a row, for the engines that have that role."""
    names: Iterable[str] = dict.fromkeys(row for looks in memory.values() for row in looks[0])
    return [
        Measurement(
            name=name,
            unit="MB",
            higher_is_better=False,
            samples={engine: [each[name] for each in looks] for engine, looks in memory.items() if name in looks[0]},
        )
        for name in names
    ]


def _has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()
