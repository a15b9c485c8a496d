"""Seconds until the first token: of a fresh process, and of the engine's construction alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Benchmark, EngineSpec, Plan, generate, interleave, load_engine, note
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

    def run(self, plan: Plan) -> Findings:
        specs = {spec.name: spec for spec in plan.specs}
        engines: dict[str, dict[str, Any]] = {}

        def turn(name: str, round_: int) -> Start:
            start, engines[name] = self._start(specs[name], plan)
            note(f"round {round_} of {plan.rounds}: {name} {start}")
            return start

        starts = interleave(plan.names, plan.rounds, turn)

        def row(name: str, field: str) -> Measurement:
            samples = {engine: [getattr(start, field) for start in taken] for engine, taken in starts.items()}
            return Measurement(name=name, unit="s", higher_is_better=False, samples=samples)

        return Findings(
            measurements=[
                row("construction to first token", "construct_s"),
                row("imports", "import_s"),
                row("process start to first token", "process_s"),
            ],
            engines=engines,
            conditions=[
                f"{plan.model.name} in float32; one request, one token; every sample a fresh process, nothing beside.",
                "Warm files: the round before the counted ones has read the weights and filled every compile cache.",
            ],
        )

    def _start(self, spec: EngineSpec, plan: Plan) -> tuple[Start, dict[str, Any]]:
        with spec.start() as driver:
            loaded = load_engine(driver, spec, plan.model)
            first = generate(driver, [PROMPT], 1)
            process_s = time.monotonic() - driver.started_s
        return Start(loaded.import_s, loaded.construct_s + first.seconds, process_s), loaded.facts
