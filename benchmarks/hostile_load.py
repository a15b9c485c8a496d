"""What an honest client of a service waits while others send their worst, beside its peer's service."""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, interleave, note
from benchmarks.peers.hostile_clients import ATTACKS, LONG_CHARS, NEW_TOKENS, NUM_HEADS, NUM_LONG, PAUSE_S
from benchmarks.result import Findings
from benchmarks.turns import measurements_from_rows

__all__ = ["HostileLoad"]

MAX_MODEL_LEN = 4096
LIMIT_S = 20.0
SLACK_S = 120.0


class HostileLoad(Benchmark):
    """time to first token of a short chat, while hostile clients send long prompts and half-sent requests"""

    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--questions", type=int, default=20, help="of the honest client, in each turn")

    def run(self, plan: Plan) -> Findings:
        if not plan.model.is_dir():
            raise BenchmarkError(f"--model {plan.model}: no such folder; `make setup` makes the default one")
        mode = next((spec.settings["mode"] for spec in plan.specs if "mode" in spec.settings), "eager")
        engine = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "device": "cpu"}
        specs = child_specs(plan.specs, "service", "service", {"engine": engine, "mode": mode})
        served = Plan(specs, plan.model, plan.rounds, plan.options)
        num = plan.options.questions
        clients_command = (sys.executable, "-m", "benchmarks.peers.hostile_clients")
        measurements = []
        with Driver("clients", clients_command) as clients, Fleet(served) as fleet:
            clients.call("load", SLACK_S, model=str(plan.model), settings={})
            targets: dict[str, Any] = {}

            def turn(name: str, attack: str, round_: int) -> Any:
                with fleet.turn(name) as driver:
                    if name not in targets:
                        targets[name] = driver.call("target", SLACK_S)
                    asked = {"target": targets[name], "attack": attack, "num": num, "limit_s": LIMIT_S}
                    rows = clients.call("beside", num * (LIMIT_S + PAUSE_S) + SLACK_S, **asked)
                note(f"{attack}, round {round_}: {name} " + ", ".join(f"{row} {value:.4g}" for row, _, value in rows))
                return rows

            for attack in ATTACKS:
                taken = interleave(list(fleet.facts), plan.rounds, lambda name, i, at=attack: turn(name, at, i))
                measurements += measurements_from_rows(taken, prefix=f"{attack}, ")
            engines = fleet.facts
        return Findings(
            measurements=measurements,
            engines=engines,
            conditions=[
                f"{plan.model.name} in float32, max_model_len {MAX_MODEL_LEN:,}, all else each service's default.",
                f"An honest client asks {num} short questions one after the other, {PAUSE_S} s apart, for {NEW_TOKENS} "
                f"streamed tokens each. No answer within {LIMIT_S:.0f} s, or an error, counts as that long.",
                f"Long conversations, long texts: {NUM_LONG} clients, each with one request of {LONG_CHARS:,} "
                "characters under way all the time, to /v1/chat/completions and to /tokenize.",
                f"Half-sent heads: {NUM_HEADS} connections with a request that is never sent to its end.",
                "All clients are one process of their own, on the same cores. Both services stay loaded; the one whose "
                "turn it is not is stopped.",
            ],
        )
