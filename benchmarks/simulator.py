"""The simulator's own speed: requests a second of wall time, over many replicas."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs
from benchmarks.result import Check, Findings, Measurement
from benchmarks.turns import Turns
from ringcore.testing.models import write_model_config

__all__ = ["Simulator"]

TIMEOUT_S = 600.0
ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")
MODEL: dict[str, Any] = {  # of eight billion parameters
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TRACE: dict[str, int] = {"prompt_tokens": 500, "output_tokens": 200, "num_prefixes": 50, "prefix_tokens": 500}


class Load(NamedTuple):
    num_replicas: int
    requests_per_s: float


A_DAY, MILLION, SECONDS_A_DAY = "a million a day", 1_000_000, 86_400
LOADS = {A_DAY: Load(64, MILLION / SECONDS_A_DAY), "busy": Load(8, 160.0)}


class Simulator(Benchmark):
    """requests/s of wall time of the simulator; needs no model"""

    needs_model: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=5000, help="of a trace (default: 5000)")

    def run(self, plan: Plan) -> Findings:
        specs = child_specs(plan.specs, "simulator", "simulator")
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            write_model_config(folder, **MODEL)
            with Fleet(replace(plan, specs=specs, model=Path(folder))) as fleet:
                turns = Turns(fleet, plan.rounds)
                cases = [(load, routing) for load in LOADS for routing in ROUTINGS]
                measurements = [one for case in cases for one in _measure(turns, plan.options.requests, *case)]
        return Findings(
            measurements=measurements,
            engines=fleet.facts,
            conditions=_conditions(plan),
            checks=_a_million(measurements),
        )


def _conditions(plan: Plan) -> list[str]:
    loads = "; ".join(
        f"{name}: {load.num_replicas} replicas, {load.requests_per_s:.1f} requests/s in virtual time"
        for name, load in LOADS.items()
    )
    return [
        f"{plan.options.requests:,} requests, Poisson arrivals, lengths exponential: one of {TRACE['num_prefixes']} "
        f"shared prefixes of {TRACE['prefix_tokens']} tokens, {TRACE['prompt_tokens']} of its own and "
        f"{TRACE['output_tokens']} new ones on average. A model of eight billion parameters on an H200 each.",
        f"{loads}.",
        "A sample is the wall time of Simulator.run, in one process a core where the routing needs to know nothing of "
        "the replicas.",
    ]


def _measure(turns: Turns, num_requests: int, load: str, routing: str) -> list[Measurement]:
    arguments: dict[str, Any] = {"routing": routing, "num_requests": num_requests, "trace": TRACE}
    return turns.measure(f"{load}, {routing}", "simulate", TIMEOUT_S, **arguments, **LOADS[load]._asdict())


def _a_million(measurements: list[Measurement]) -> list[Check]:
    """How long the day would take as a whole."""
    checks = []
    for one in measurements:
        if one.name.startswith(A_DAY) and one.unit == "requests/s":
            ((engine, samples),) = one.samples.items()
            minutes = MILLION / median(samples) / 60
            name = f"{one.name.rpartition(', ')[0]}, the whole day"
            checks.append(Check(name=name, value=f"{minutes:.1f} min at this rate", data={engine: minutes}))
    return checks
