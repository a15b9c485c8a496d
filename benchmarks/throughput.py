"""Tokens a second of one batch at a time, against what the memory and the arithmetic units allow."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.harness import Benchmark, Fleet, Plan, generate, interleave, note
from benchmarks.prompts import PromptStream
from benchmarks.result import Check, Findings, Limit, Measurement
from ringcore.checkpoint import find_model, read_safetensors_header

__all__ = ["Throughput", "count_equal_tokens", "decode_limit", "weights_read_a_step"]

LIMITS_TIMEOUT_S = 120.0
FLOAT32_BYTES = 4


class Throughput(Benchmark):
    """tokens/s of a batch of short prompts in float32, text in to text out"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="batch sizes (default: 1 16 64)")
        parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each prompt (default: 64)")

    def run(self, plan: Plan) -> Findings:
        num_weights = weights_read_a_step(plan.model)
        command = (sys.executable, "-m", "benchmarks.limits")
        batches = [Batch(size, plan) for size in plan.options.batch]
        with Driver("limits", command) as limits, Fleet(plan) as fleet:
            measurements = [batch.measure(fleet, limits, num_weights) for batch in batches]
        return Findings(
            measurements=measurements,
            engines=fleet.facts,
            conditions=self._conditions(plan),
            checks=[check for batch in batches for check in batch.checks()],
        )

    def _conditions(self, plan: Plan) -> list[str]:
        return [
            f"{plan.model.name} in float32, greedy, {plan.options.new_tokens} new tokens each, past any end of text.",
            "Prompts of about eight tokens, other ones in every round, too short to fill a block of any prefix cache.",
            "A sample is the wall time of one generate() call with the whole batch, text in to text out.",
            "Every engine runs in a process of its own, with its own defaults but for the settings named below.",
            "All engines but the one whose turn it is are stopped.",
        ]


@dataclass(frozen=True)
class Limits:
    read_bytes_per_s: float
    gemm_flops_per_s: float


class Batch:
    """One batch size: its samples, and the tokens every engine gave for the same prompts."""

    def __init__(self, size: int, plan: Plan) -> None:
        self.size = size
        self._plan = plan
        self._new_tokens: int = plan.options.new_tokens
        stream = PromptStream(seed=size)
        self._prompts = [stream.take(size) for _ in range(plan.rounds + 1)]
        self._first_tokens: dict[str, list[list[int]]] = {}

    def measure(self, fleet: Fleet, limits: Driver, num_weights: int) -> Measurement:
        def turn(name: str, round_: int) -> float:
            with fleet.turn(name) as driver:
                reply = generate(driver, self._prompts[round_], self._new_tokens)
            if round_ == 0:
                self._first_tokens[name] = reply.token_ids
            rate = self.size * self._new_tokens / reply.seconds
            note(f"batch {self.size}, round {round_} of {self._plan.rounds}: {name} {rate:.1f} tokens/s")
            return rate

        before = limits.call("measure", LIMITS_TIMEOUT_S)
        samples = interleave(self._plan.names, self._plan.rounds, turn)
        after = limits.call("measure", LIMITS_TIMEOUT_S)
        best = Limits(*(max(before[key], after[key]) for key in ("read_bytes_per_s", "gemm_flops_per_s")))
        return Measurement(
            name=f"batch {self.size}",
            unit="tokens/s",
            higher_is_better=True,
            samples=samples,
            limit=decode_limit(self.size, num_weights, best),
        )

    def checks(self) -> list[Check]:
        """How far each peer's tokens of the first round are ringcore's, so that a fast wrong answer shows."""
        ours, *peers = self._plan.names
        checks = []
        for peer in peers:
            pairs = zip(self._first_tokens[ours], self._first_tokens[peer], strict=True)
            equal = [count_equal_tokens(a, b) for a, b in pairs]
            checks.append(
                Check(
                    name=f"tokens equal to those of {peer}, batch {self.size}",
                    value=f"{sum(equal)} of {self.size * self._new_tokens}",
                    data=equal,
                )
            )
        return checks


def count_equal_tokens(ours: list[int], theirs: list[int]) -> int:
    """Tokens up to the first difference: after it the two continue different texts."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def decode_limit(batch: int, num_weights: int, limits: Limits) -> Limit:
    """The most tokens/s at which `batch` sequences can decode; reading the KV cache and the prompts are left out."""
    read_s = num_weights * FLOAT32_BYTES / limits.read_bytes_per_s
    multiply_s = 2 * num_weights * batch / limits.gemm_flops_per_s
    bound = (
        f"reading {num_weights * FLOAT32_BYTES / 1e6:.0f} MB of weights once a step at "
        f"{limits.read_bytes_per_s / 1e9:.1f} GB/s"
        if read_s >= multiply_s
        else f"{2 * num_weights * batch / 1e9:.1f} GFLOP a step at {limits.gemm_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    return Limit(value=batch / max(read_s, multiply_s), statement=bound)


def weights_read_a_step(model: Path) -> int:
    """How many weights one decode step reads. An untied input embedding does not count: it gives one row a token."""
    files = find_model(model, "safetensors")
    shapes: dict[str, Any] = {}
    for file in files.weight_files:
        shapes |= {name: entry.shape for name, entry in read_safetensors_header(file).items()}
    if "lm_head.weight" in shapes:
        shapes.pop("model.embed_tokens.weight", None)
    if not shapes:
        raise BenchmarkError(f"{model}: no weights in safetensors files; give --model a Hugging Face folder")
    return sum(math.prod(shape) for shape in shapes.values())
