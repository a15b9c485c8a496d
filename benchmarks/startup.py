"""Seconds until the first token: of a fresh process, and of the engine's construction alone."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Benchmark, EngineSpec, Plan, generate, interleave, load_engine, note
from benchmarks.parked import parked, parked_spec
from benchmarks.result import Findings, Measurement

__all__ = ["Startup"]

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class Start:
    """Seconds of one start. `process_s` counts from the process's creation, `construct_s` from after the imports."""

    import_s: float
    construct_s: float
    process_s: float


class Startup(Benchmark):
    """seconds from construction, and from process start, to the first token"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--parked", action="store_true", help="also starts of ringcore that adopt a parked engine")

    def run(self, plan: Plan) -> Findings:
        first, *others = plan.specs
        adopting = [parked_spec(first, f"{first.name} parked")] if plan.options.parked else []
        specs = {spec.name: spec for spec in (first, *adopting, *others)}
        engines: dict[str, dict[str, Any]] = {}

        def turn(name: str, round_: int) -> Start:
            start, engines[name] = self._start(specs[name], plan)
            note(f"round {round_} of {plan.rounds}: {name} {start}")
            return start

        starts = interleave(list(specs), plan.rounds, turn)

        def row(name: str, field: str) -> Measurement:
            samples = {engine: [getattr(start, field) for start in taken] for engine, taken in starts.items()}
            shown = f"{name}, beside a parked engine" if adopting else name
            return Measurement(name=shown, unit="s", higher_is_better=False, samples=samples)

        return Findings(
            measurements=[
                row("construction to first token", "construct_s"),
                row("imports", "import_s"),
                row("process start to first token", "process_s"),
            ],
            engines=engines,
            conditions=[
                f"{plan.model.name} in float32; one request, one token; every sample a fresh process, nothing beside.",
                "Parked: an engine of the same options waits with all of its memory; its own start is not counted.",
                "Warm files: the round before the counted ones has read the weights and filled every compile cache.",
            ],
        )

    def _start(self, spec: EngineSpec, plan: Plan) -> tuple[Start, dict[str, Any]]:
        with parked(spec, plan.model), spec.start() as driver:
            loaded = load_engine(driver, spec, plan.model)
            first = generate(driver, [PROMPT], 1)
            process_s = time.monotonic() - driver.started_s
        return Start(loaded.import_s, loaded.construct_s + first.seconds, process_s), loaded.facts
