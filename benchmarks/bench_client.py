"""What the client of `ringcore bench` can take: streams of a server that costs next to nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import ClassVar

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs
from benchmarks.result import Findings
from benchmarks.turns import Turns

__all__ = ["BenchClientCeiling"]

TIMEOUT_S = 300.0


class BenchClientCeiling(Benchmark):
    """events/s that the client of `ringcore bench` can read; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--streams", type=int, default=1000, help="at once (default: 1000)")
        parser.add_argument("--events", type=int, default=100, help="of each stream (default: 100)")
        parser.add_argument("--interval-ms", type=float, default=100.0, help="between events, if paced (default: 100)")

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        measurements = []
        specs = child_specs(plan.specs, "bench_client", "load client")
        with Fleet(replace(plan, specs=specs)) as fleet:
            turns = Turns(fleet, plan.rounds)
            for shown, interval_s in (
                ("flat out", 0.0),
                (f"paced, {options.interval_ms:g} ms", options.interval_ms / 1e3),
            ):
                arguments = {"num_streams": options.streams, "num_events": options.events, "interval_s": interval_s}
                measurements += turns.measure(f"{options.streams:,} streams, {shown}", "stream", TIMEOUT_S, **arguments)
        return Findings(measurements=measurements, engines=fleet.facts, conditions=_conditions(plan))


def _conditions(plan: Plan) -> list[str]:
    return [
        f"{plan.options.streams:,} completions at once over loopback, {plan.options.events} events each, one token an "
        "event, from a server in a process of its own (`peers/stream_server.py`) that writes made bytes.",
        "Flat out: the server writes as fast as it is read from. Paced: an event each interval; what a gap is longer "
        "than the interval is the client's, the server's and the machine's.",
    ]
