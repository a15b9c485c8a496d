"""Tokens a second and memory of GGUF files on a CPU: as numbers, in their blocks, and by llama.cpp."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from benchmarks.driver import BenchmarkError
from benchmarks.footprint import TOTAL, look
from benchmarks.harness import Benchmark, EngineSpec, Fleet, Plan, generate, interleave, note
from benchmarks.prompts import PromptStream
from benchmarks.result import Findings, Measurement

__all__ = ["GgufDecode", "gguf_specs"]

WEIGHTS = ("packed_int8", "packed", "expanded")  # the first compares with llama.cpp, which rounds inputs too


class GgufDecode(Benchmark):
    """tokens/s and memory of GGUF files, packed and expanded, beside llama.cpp"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--files", type=Path, nargs="+", required=True, help="GGUF files with their tokenizers")
        parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes (default: 1 16)")
        parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each prompt (default: 64)")

    def run(self, plan: Plan) -> Findings:
        specs = gguf_specs(plan.specs)
        measurements: list[Measurement] = []
        engines = {}
        for file in plan.options.files:
            if not file.is_file():
                raise BenchmarkError(f"--files {file}: no such file")
            of_file = replace(plan, specs=specs, model=file.absolute())
            with Fleet(of_file) as fleet:
                engines |= fleet.facts
                measurements += [_speed(fleet, of_file, size) for size in plan.options.batch]
                measurements.append(_memory(fleet, of_file))
        return Findings(
            measurements=measurements,
            engines=engines,
            conditions=[
                f"Greedy, {plan.options.new_tokens} new tokens each, prompts of about eight tokens, text in to text "
                "out. ringcore computes in float32; packed_int8 rounds the inputs of products to 8 bits, as llama.cpp.",
                "Memory is proportional (PSS), of all processes of an engine after the largest batch.",
            ],
        )


def gguf_specs(specs: list[EngineSpec] | tuple[EngineSpec, ...]) -> list[EngineSpec]:
    """ringcore once for each way to hold the weights, then the peers."""
    ours, *peers = specs
    return [replace(ours, name=f"ringcore {kind}", settings={"gguf_weights": kind}) for kind in WEIGHTS] + peers


def _speed(fleet: Fleet, plan: Plan, size: int) -> Measurement:
    stream, new_tokens = PromptStream(seed=size), plan.options.new_tokens
    prompts = [stream.take(size) for _ in range(plan.rounds + 1)]

    def turn(name: str, round_: int) -> float:
        with fleet.turn(name) as driver:
            rate = size * new_tokens / generate(driver, prompts[round_], new_tokens).seconds
        note(f"{plan.model.name}, batch {size}, round {round_}: {name} {rate:.1f} tokens/s")
        return rate

    samples = interleave(plan.names, plan.rounds, turn)
    return Measurement(name=f"{plan.model.name}, batch {size}", unit="tokens/s", higher_is_better=True, samples=samples)


def _memory(fleet: Fleet, plan: Plan) -> Measurement:
    samples = {}
    for name in plan.names:
        with fleet.turn(name) as driver:
            samples[name] = [look(driver, {})[TOTAL]]
    size = plan.model.stat().st_size / 1e6
    return Measurement(
        name=f"{plan.model.name} of {size:.0f} MB, memory", unit="MB", higher_is_better=False, samples=samples
    )
