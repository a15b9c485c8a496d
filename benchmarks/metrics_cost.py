"""What the metrics of an engine cost a step when the workers cost nothing."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, numbers
from benchmarks.peers.null_loops import VOCAB_SIZE, Load
from benchmarks.result import Findings
from benchmarks.turns import Turns
from ringcore.testing.models import write_model_config

__all__ = ["MetricsCost"]

REQUESTS = "1,32,256"
TIMEOUT_S = 600.0


class MetricsCost(Benchmark):
    """time that Prometheus metrics add to a step of an engine whose workers cost nothing; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", default=REQUESTS, help=f"how many decode at once (default: {REQUESTS})")
        parser.add_argument("--pairs", type=int, default=10, help="turns with and without, of a round (default: 10)")
        parser.add_argument("--steps", type=int, default=2048, help="of a turn, for one request (default: 2048)")

    def run(self, plan: Plan) -> Findings:
        options, measurements = plan.options, []
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            write_model_config(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=Load(1, True).max_model_len)
            specs = child_specs(plan.specs, "metrics", "metrics")
            with Fleet(replace(plan, specs=specs, model=Path(folder))) as fleet:
                turns = Turns(fleet, plan.rounds)
                for size in numbers("--requests", options.requests):
                    shown, num_tokens = (
                        f"{size} request{'s' * (size > 1)}",
                        min(options.steps, Load(size, True).max_tokens),
                    )
                    arguments = {"num_requests": size, "num_tokens": num_tokens, "num_pairs": options.pairs}
                    measurements += turns.measure(f"{shown}, observers", "observers", TIMEOUT_S, num_requests=size)
                    measurements += turns.measure(shown, "compare", TIMEOUT_S, **arguments)
        return Findings(measurements=measurements, engines=fleet.facts, conditions=_conditions(plan))


def _conditions(plan: Plan) -> list[str]:
    return [
        "As the benchmark null_engine, with the engine in a process of its own: requests that decode together, and an "
        "executor that gives each a token at once. One engine has its metrics on, one has not; they take turns.",
        f"A sample is the medians of {plan.options.pairs} pairs of turns. CPU: of the client's process and of the "
        "engine's together. Two engines without metrics differ by some percent so, on a machine that others use too; "
        "what the observers take, called by themselves, is exact.",
        "Metrics on: the histograms of the engine's steps, and the request log at its client. No scrape within a turn.",
    ]
