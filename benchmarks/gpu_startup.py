"""Seconds to the first token on a GPU, with every compile cache empty and with those that such a start leaves."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.driver import BenchmarkError
from benchmarks.footprint import import_cost
from benchmarks.gpu_options import Deadline, add_engine_arguments, gpu_specs
from benchmarks.harness import Benchmark, EngineSpec, Plan, interleave, load_engine, note
from benchmarks.models import PublishedModel, find_published
from benchmarks.parked import parked, parked_spec
from benchmarks.result import FAILED, Check, Findings, Measurement
from benchmarks.turns import measurements_from_rows

__all__ = ["GpuStartup"]

FIRST_TOKEN_TIMEOUT_S = 120.0
STATEMENTS = {
    "ringcore": "import ringcore.front_end.client, torch",
    "vllm": "from vllm import LLM, SamplingParams",
}
# Where engines, and what they compile with, keep what they compiled.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
Rows = list[tuple[str, str, float]]


class GpuStartup(Benchmark):
    """seconds to the first token on a GPU, compile caches empty and filled; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 2

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser)
        parser.add_argument("--parked", action="store_true", help="also starts of ringcore that adopt a parked engine")
        parser.set_defaults(models="Qwen3-0.6B")
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        session, deadline = _Session(plan), Deadline(plan.options.seconds)
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            for model in find_published(plan.options.models):
                if deadline.allows(model.name):
                    session.measure(model, model.write(Path(folder)))
        return session.findings()


class _Session:
    """All models of one run; an engine that fails is out of the rest of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs = {spec.name: spec for spec in gpu_specs(plan, "gpu", are_together=False)}
        self._engines: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []
        self._failures: dict[str, Check] = {}  # by engine

    def measure(self, model: PublishedModel, folder: Path) -> None:
        def turn(name: str, round_: int) -> Rows:
            if name in self._failures:
                return []
            try:
                if round_ == 0:
                    _read_files(self._specs[name])
                    return []
                with_parked = self._plan.options.parked and name.startswith("ringcore")
                rows, self._engines[name] = _cold_and_warm(self._specs[name], folder, with_parked)
            except BenchmarkError as error:
                note(f"{name} failed, {model.name}: {error.message}")
                first = error.message.splitlines()[0]
                self._failures[name] = Check(name=f"{name}{FAILED}{model.name}", value=first)
                return []
            note(f"{model.name}, round {round_} of {self._plan.rounds}: {name} {_shown(rows)}")
            return rows

        taken = interleave(list(self._specs), self._plan.rounds, turn)
        whole = {name: rounds for name, rounds in taken.items() if name not in self._failures}
        self._measurements += measurements_from_rows(whole, prefix=f"{model.name}, ")

    def findings(self) -> Findings:
        if not self._measurements:
            reasons = "; ".join(check.value for check in self._failures.values())
            raise BenchmarkError(f"nothing was measured: {reasons or 'there was no time'}")
        return Findings(
            measurements=self._measurements,
            engines={name: self._engines[name] for name in self._specs if name in self._engines},
            conditions=_conditions(self._plan.options.dtype),
            checks=list(self._failures.values()),
        )


def _read_files(spec: EngineSpec) -> None:
    """Brings the packages' files into the page cache: a fresh machine's disk is no engine's matter."""
    note(f"{spec.name}: reading its packages")
    import_cost(spec.python, STATEMENTS[spec.name.split()[0]], spec.env)  # "ringcore by transformers" is ringcore


def _cold_and_warm(spec: EngineSpec, model: Path, with_parked: bool) -> tuple[Rows, dict[str, Any]]:
    """Two starts in caches of their own, the second with what the first left there; rows, and the engine's facts.
    with_parked: and two that adopt an engine, which holds its memory meanwhile, and which sleeps."""
    with tempfile.TemporaryDirectory(prefix="caches-") as folder:
        paths = {variable: f"{folder}/{variable.lower()}" for variable in CACHES}
        started = replace(spec, env={**spec.env, **paths})
        cold, _ = _start(started, model)
        warm, facts = _start(started, model)
        parts = {"cold": cold, "warm": warm}
        if with_parked:
            for label, can_sleep in (("parked", False), ("parked asleep", True)):
                adopting = parked_spec(started, spec.name, enable_sleep_mode=can_sleep)
                with parked(adopting, model):
                    parts[label], _ = _start(adopting, model)
    facts["env"] = {name: value for name, value in facts["env"].items() if name not in CACHES}
    rows = [(f"{label}, {name}", unit, value) for label, part in parts.items() for name, unit, value in part]
    return rows, facts


def _start(spec: EngineSpec, model: Path) -> tuple[Rows, dict[str, Any]]:
    with spec.start() as driver:
        loaded = load_engine(driver, spec, model)
        first_s = driver.call("first_token", FIRST_TOKEN_TIMEOUT_S)
        process_s = time.monotonic() - driver.started_s
        phases: Mapping[str, float] = driver.call("phases", FIRST_TOKEN_TIMEOUT_S)
    seconds = {
        "imports": loaded.import_s,
        "construction": loaded.construct_s,
        "construction to first token": loaded.construct_s + first_s,
        "process start to first token": process_s,
        **{f"phase {name}": value for name, value in phases.items()},
    }
    return [(name, "s", value) for name, value in seconds.items()], dict(loaded.facts)


def _shown(rows: Rows) -> str:
    return ", ".join(f"{name} {value:.2f} {unit}" for name, unit, value in rows)


def _conditions(dtype: str) -> list[str]:
    return [
        f"Random weights in {dtype}; one request of one token; every start a fresh process, nothing beside it.",
        "Cold: the folders where engines keep what they compiled are new. Warm: they hold what a cold start left. "
        "The packages' files were read before.",
        "Parked: an engine of the same options waits with all of its memory. Asleep: with its weights in host memory.",
        "Phases are those that the engine tells of itself.",
    ]
