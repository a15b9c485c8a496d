"""What deterministic=True costs: tokens a second with it and without."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from benchmarks.gpu_options import add_place_arguments, with_deterministic
from benchmarks.harness import Benchmark, EngineSpec, Fleet, Plan, generate, interleave, note
from benchmarks.prompts import PromptStream
from benchmarks.result import Findings, Measurement

__all__ = ["Deterministic", "deterministic_specs"]

_OFFLINE = 64  # prompts of the offline run
_PARTS = 24  # short prompts in one of them: about 200 tokens


class Deterministic(Benchmark):
    """tokens/s with deterministic=True and without, beside vLLM's batch-invariant mode"""

    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="(default: 1 32 256)")
        parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each prompt (default: 64)")
        parser.add_argument("--threads", type=int, help="of a CPU, for each engine (default: its own)")

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        specs = deterministic_specs(plan.specs, options.device, options.dtype)
        if options.threads is not None:  # that sleep while they wait: another program may have their core
            env = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
            specs = [replace(spec, env={**spec.env, **env}) for spec in specs]
        of_run = replace(plan, specs=specs)
        with Fleet(of_run) as fleet:
            measurements = [
                _speed(fleet, of_run, f"decode, batch {size}", size, parts=1, new_tokens=options.new_tokens)
                for size in options.batch
            ]
            new_tokens = max(1, options.new_tokens // 4)
            measurements.append(
                _speed(fleet, of_run, "offline, prompts", _OFFLINE, parts=_PARTS, new_tokens=new_tokens)
            )
            engines = fleet.facts
        return Findings(
            measurements=measurements,
            engines=engines,
            conditions=[
                f"{plan.model.name} in {options.dtype} on {options.device}, greedy. Decode: prompts of about eight "
                f"tokens and {options.new_tokens} new ones. Offline: {_OFFLINE} prompts of about 200 tokens and "
                f"{new_tokens} new ones; other prompts in every round. A sample is the wall time of one generate() "
                "call, text in to text out, in new tokens a second.",
            ],
        )


def deterministic_specs(specs: Sequence[EngineSpec], device: str, dtype: str) -> list[EngineSpec]:
    """Each on `device` in `dtype`, once by its default and, where it has such a mode, once deterministic."""
    ours, *peers = specs
    placed = [replace(ours, settings={"device": device, "dtype": dtype})]
    placed += [replace(peer, settings={**peer.settings, "dtype": dtype}) for peer in peers]
    return with_deterministic(placed)


def _speed(fleet: Fleet, plan: Plan, name: str, size: int, parts: int, new_tokens: int) -> Measurement:
    stream = PromptStream(seed=size)
    prompts = [[" ".join(stream.take(parts)) for _ in range(size)] for _ in range(plan.rounds + 1)]

    def turn(engine: str, round_: int) -> float:
        with fleet.turn(engine) as driver:
            rate = size * new_tokens / generate(driver, prompts[round_], new_tokens).seconds
        note(f"{name}, round {round_}: {engine} {rate:.1f} tokens/s")
        return rate

    samples = interleave(plan.names, plan.rounds, turn)
    return Measurement(name=name, unit="tokens/s", higher_is_better=True, samples=samples)
