"""ringcore's scheduler beside vLLM's: microseconds of a step that decodes, and of one in which requests come and go."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, numbers
from benchmarks.peers.scheduler_loops import (
    BLOCK_SIZE,
    CHURN_PROMPT,
    CHURN_TOKENS,
    MAX_LAPS,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MIN_LAPS,
    STEADY_PROMPT,
    VOCAB_SIZE,
)
from benchmarks.result import Check, Findings, Limit, Measurement
from benchmarks.turns import Turns, measurements_from_rows
from ringcore.testing.models import write_model_config

__all__ = ["Scheduler", "growth_exponent", "slope", "step_floor"]

RUNNING = "1,8,32,128,256,1024,4096"
TIMEOUT_S = 600.0
FLOOR_REPEATS = 200
CHURNS = {  # name -> share of the blocks, whether in bursts
    "churn": (1.0, False),
    "churn in bursts, 70% of the blocks": (0.7, True),
}


class Scheduler(Benchmark):
    """microseconds of a scheduler's step, by how many requests run; needs no model"""

    needs_model: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--running", default=RUNNING, help=f"how many requests run (default: {RUNNING})")
        parser.add_argument("--churn", type=int, default=256, help="how many while requests come and go (default: 256)")
        parser.add_argument("--churn-laps", type=int, default=10, help="of ten steps, in a sample of it (default: 10)")

    def run(self, plan: Plan) -> Findings:
        sizes = numbers("--running", plan.options.running)
        specs = child_specs(plan.specs, "scheduler", "scheduler")
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            write_model_config(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN)
            with Fleet(replace(plan, specs=specs, model=Path(folder))) as fleet:
                turns = Turns(fleet, plan.rounds)
                steady = [one for depth in (1, 2) for size in sizes for one in _steady(turns, size, depth)]
                churns = [_churn(turns, plan.options, name) for name in CHURNS]
        steady = _by_kind(steady)
        return Findings(
            measurements=steady + [one for churn in churns for one in churn[0]],
            engines=fleet.facts,
            conditions=_conditions(plan),
            checks=[*_growth(steady, sizes), *(check for churn in churns for check in churn[1]), *turns.core_checks()],
        )


def _conditions(plan: Plan) -> list[str]:
    return [
        f"Decode: prompts of {STEADY_PROMPT} random tokens that share nothing, admitted over {BLOCK_SIZE} steps: in "
        f"each step a sixteenth of the requests fills a block. A sample is the median of {MIN_LAPS} to {MAX_LAPS} laps "
        f"of {BLOCK_SIZE} steps.",
        "A step: schedule(), encoding its message to the workers, decoding their reply, and update(), which makes the "
        "outputs. The workers' part is not in it; their reply is a token for every request.",
        "Messages: ringcore's msgpack, vLLM's pickle, as their executors do it. Outputs: encoding them for the front "
        "end, decoding them there and reading them request by request, as the client of each does it.",
        "Two steps in flight: the step after is scheduled before the tokens of the one before are known (vLLM: "
        "AsyncScheduler).",
        f"Churn: {plan.options.churn} requests with prompts of {CHURN_PROMPT} tokens and {CHURN_TOKENS} new ones; for "
        "each that finishes another arrives. In bursts: all begin at once, so that their blocks run out in one step. A "
        "step has the adding of the requests in it: checking, hashing, looking for a prefix; a finished request is the "
        f"time of a lap of {CHURN_TOKENS} steps over those that finished in it.",
        f"Both: blocks of {BLOCK_SIZE}, prefix caching, max_num_seqs as many as run, blocks for all of them (but where "
        f"the row says less), {MAX_NUM_BATCHED_TOKENS:,} tokens a step, greedy, no end of text; objects of start-up "
        "frozen for the garbage collector, as both engines do.",
        "All schedulers but the one whose turn it is are stopped.",
    ]


def _steady(turns: Turns, num_running: int, steps_in_flight: int) -> list[Measurement]:
    shown = f"{num_running:,} running{', two steps in flight' if steps_in_flight > 1 else ''}"
    limits = {"step": step_floor(num_running)} if steps_in_flight == 1 else {}
    arguments = {"num_running": num_running, "steps_in_flight": steps_in_flight}
    return turns.measure(shown, "steady", TIMEOUT_S, limits=limits, **arguments)


def _churn(turns: Turns, options: argparse.Namespace, name: str) -> tuple[list[Measurement], list[Check]]:
    pool_share, is_burst = CHURNS[name]
    arguments = {"num_running": options.churn, "num_laps": options.churn_laps, "pool_share": pool_share}
    taken = turns.take(name, "churn", TIMEOUT_S, is_burst=is_burst, **arguments)
    checks = []
    for engine, replies in taken.items():
        counts = {key: median(reply[key] for reply in replies) for key in ("running", "finished", "preempted")}
        value = "{running:.0f} running, {finished:.1f} finished, {preempted:.1f} preempted".format(**counts)
        checks.append(Check(name=f"{name}, {engine}, a step", value=value, data=counts))
    rows = {engine: [reply["rows"] for reply in replies] for engine, replies in taken.items()}
    return measurements_from_rows(rows, prefix=f"{name}, "), checks


def _by_kind(measurements: Sequence[Measurement]) -> list[Measurement]:
    """All sizes of one kind one below the other: first the steps as a whole, then their parts."""
    kinds = dict.fromkeys(measurement.name.rpartition(", ")[2] for measurement in measurements)
    return [m for kind in kinds for m in measurements if m.name.rpartition(", ")[2] == kind]


def _growth(measurements: Sequence[Measurement], sizes: Sequence[int]) -> list[Check]:
    """How the medians of a step grow with the number of requests, in the steps one and two at a time."""
    checks: list[Check] = []
    if len(sizes) < 2:
        return checks
    steps = [measurement for measurement in measurements if measurement.name.endswith(" running, step")]
    overlapped = [measurement for measurement in measurements if measurement.name.endswith("two steps in flight, step")]
    for name, rows in (("a step", steps), ("a step, two in flight", overlapped)):
        for engine in rows[0].samples:
            medians = [median(row.samples[engine]) for row in rows]
            a_request, exponent = slope(sizes, medians), growth_exponent(sizes, medians)
            value = f"{a_request:.3f} µs a request (least squares), growing as n^{exponent:.2f} (of the logarithms)"
            data = {"us_a_request": a_request, "exponent": exponent}
            checks.append(Check(name=f"{name}, {engine}", value=value, data=data))
    return checks


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line nearest to the points."""
    return float(np.polyfit(x, y, 1)[0])


def growth_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """k of the curve y = c x^k nearest to the points, by logarithms."""
    return slope(np.log(x).tolist(), np.log(y).tolist())


def step_floor(num_running: int) -> Limit:
    """What is left of a step in numpy where nothing has to be decided: one token stored for each row."""
    rows = np.arange(num_running)
    lengths, computed = np.full((2, num_running), STEADY_PROMPT)
    tokens, stored = np.full(num_running, 7, np.int32), np.zeros((num_running, MAX_MODEL_LEN), np.int32)

    def step() -> None:
        stored[rows, lengths] = tokens
        np.add(lengths, 1, out=lengths)
        np.add(computed, 1, out=computed)
        (lengths >= MAX_MODEL_LEN).any()

    taken = []
    for _ in range(FLOOR_REPEATS):
        began_s = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began_s)
    statement = "storing a token for each row by its position, two additions and a comparison in numpy"
    return Limit(value=min(taken) * 1e6, statement=statement)
