"""The whole engine without a model: what a step costs when the workers cost nothing."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, numbers
from benchmarks.peers.null_loops import MAX_TOKENS, MIN_TOKENS, PROMPT_TOKENS, VOCAB_SIZE, Load
from benchmarks.result import Findings, Measurement
from benchmarks.turns import Turns
from ringcore.testing.models import write_model_config

__all__ = ["NullEngine"]

REQUESTS = "1,32,256,1024"
TIMEOUT_S = 600.0
PLACES = {"engine in a process of its own": True, "engine in the caller's process": False}


class NullEngine(Benchmark):
    """steps/s of the whole engine where workers cost nothing; needs no model"""

    needs_model: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", default=REQUESTS, help=f"how many decode at once (default: {REQUESTS})")

    def run(self, plan: Plan) -> Findings:
        sizes = numbers("--requests", plan.options.requests)
        specs = child_specs(plan.specs, "null", "engine without a model")
        longest = max(Load(size, True).max_model_len for size in sizes)
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            write_model_config(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=longest)
            with Fleet(replace(plan, specs=specs, model=Path(folder))) as fleet:
                turns = Turns(fleet, plan.rounds)
                cases = [(place, size) for place in PLACES for size in sizes]
                measurements = [one for place, size in cases for one in _measure(turns, place, size)]
        return Findings(measurements=measurements, engines=fleet.facts, conditions=_conditions())


def _conditions() -> list[str]:
    return [
        f"Requests with prompts of {PROMPT_TOKENS} tokens arrive together and decode, greedy, past any end of text, "
        f"{MAX_TOKENS:,} to {MIN_TOKENS} tokens each, the more the fewer requests. A sample is measured from the "
        "arrival to the last token of all, as the client has it.",
        "In place of the workers is an executor in the engine's process that gives each request one token: a "
        "FakeExecutor of ringcore.testing with a worker that keeps no more than what each row knows and has computed; "
        "for vLLM an Executor that keeps nothing.",
        "All else is the engine as it is: scheduler, outputs, and from a process of its own the messages to its client "
        "(ringcore: EngineCoreClient; vLLM: SyncMPClient), which reads them as one object for each request.",
        "Both schedule a step ahead of the tokens (vLLM: async scheduling, its default on a GPU).",
        "All engines but the one whose turn it is are stopped.",
    ]


def _measure(turns: Turns, place: str, size: int) -> list[Measurement]:
    shown = f"{place}, {size:,} request{'s' * (size > 1)}"
    return turns.measure(shown, "decode", TIMEOUT_S, num_requests=size, has_process=PLACES[place])
