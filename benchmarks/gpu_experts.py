"""Every grouped product of published mixtures of experts by each tile."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import msgspec

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu import measure_ceilings
from benchmarks.gpu_options import Deadline, add_place_arguments, bytes_a_number
from benchmarks.harness import Benchmark, Plan, note, numbers
from benchmarks.models import PublishedModel, find_published
from benchmarks.result import Check, Findings, Limit, Measurement
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import DENSE_NUMBERS, FP8_NUMBERS
from ringcore.kernels.mixtures.experts_configs import grouped_tiles

__all__ = ["ExpertsCase", "GpuExperts", "tiles"]

TIMEOUT_S = 120.0
TOKENS = (2, 8, 32, 64, 256, 1024)  # one token takes other kernels


class ExpertsCase(msgspec.Struct, frozen=True):
    """One product of a layer for so many tokens."""

    shown: str
    num_tokens: int
    num_experts: int
    k: int
    num_weights: int
    num_inputs: int
    is_gated: bool
    is_fp8: bool = False  # weights and rows, in blocks of 128

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As in `ringcore.kernels.mixtures.experts_measured`."""
        return self.num_experts, self.k, self.num_weights, self.num_inputs


class GpuExperts(Benchmark):
    """Time of the grouped products of mixtures by tile against only reading the weights; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 1

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        parser.add_argument("--models", default="Qwen3-30B-A3B", help="mixtures of experts (default: Qwen3-30B-A3B)")
        parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens of a step")
        parser.add_argument("--compilers", type=int, default=8, help="processes that compile beforehand (default: 8)")
        parser.add_argument("--table", type=Path, metavar="FILE", help="the best tiles, as lines of Python")
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        counts = numbers("--tokens", options.tokens)
        cases = [case for model in find_published(options.models) for case in cases_of(model, counts)]
        ceilings, deadline = measure_ceilings(options.device, options.dtype), Deadline(options.seconds)
        measurements, best = [], dict[ExpertsCase, DotConfig]()
        with ExitStack() as stack:
            drivers = [_child(stack) for _ in range(max(1, options.compilers))]
            place = {"device": options.device, "dtype": options.dtype}
            facts, *_ = [driver.call("load", TIMEOUT_S, **place) for driver in drivers]
            for case in cases:
                if deadline.allows(case.shown):
                    number_bytes = 1 if case.is_fp8 else bytes_a_number(options.dtype)
                    rate = ceilings.read_bytes_per_s / number_bytes
                    measurement, best[case] = _measured(drivers, case, rate)
                    measurements.append(measurement)
        if options.table is not None:
            options.table.write_text("\n".join(_lines(best)) + "\n")
        engine = {"python": facts["python"], "packages": facts["packages"], "settings": {}, "env": {}}
        return Findings(
            measurements=measurements,
            engines={"chosen": engine, "best": engine},
            conditions=[
                "One product at a time, calls one after the other in a CUDA graph, over the weights of three layers "
                "and a routing of random tokens for each; compared with the products in float32 before it is timed.",
                "Chosen: the tile that the engine takes; best: of those that were tried.",
            ],
            checks=[Check(name=case.shown, value=str(config)) for case, config in best.items()],
        )


def cases_of(model: PublishedModel, counts: list[int]) -> Iterator[ExpertsCase]:
    """Gate and up, and down. Raises `BenchmarkError` of a dense model."""
    c = model.config
    num_experts = c.get("num_experts") or c.get("n_routed_experts")
    if not num_experts:
        raise BenchmarkError(f"--models {model.name}: it has no experts", name=model.name)
    k, hidden, size = c["num_experts_per_tok"], c["hidden_size"], c["moe_intermediate_size"]
    is_fp8 = c.get("quantization_config", {}).get("quant_method") == "fp8"
    for n in counts:
        shown = f"{model.name}, {n:,} tokens"
        yield ExpertsCase(f"{shown}, gate and up", n, num_experts, k, 2 * size, hidden, True, is_fp8)
        yield ExpertsCase(f"{shown}, down", n, num_experts, k, hidden, size, False, is_fp8)


def tiles(case: ExpertsCase) -> list[DotConfig]:
    """All that are tried."""
    numbers = FP8_NUMBERS if case.is_fp8 else DENSE_NUMBERS
    return grouped_tiles(case.num_experts, case.num_inputs, case.num_tokens, case.k, numbers)


def _child(stack: ExitStack) -> Driver:
    return stack.enter_context(Driver("experts", (sys.executable, "-m", "benchmarks.peers.experts")))


def _measured(drivers: list[Driver], case: ExpertsCase, rate: float) -> tuple[Measurement, DotConfig]:
    """rate: numbers read a second."""
    tried = tiles(case)
    arguments = [{"case": msgspec.to_builtins(case), "config": dataclasses.asdict(tile)} for tile in tried]
    for first in range(0, len(tried), len(drivers)):
        sent = list(zip(drivers, arguments[first : first + len(drivers)], strict=False))
        for driver, one in sent:
            driver.send("measure", TIMEOUT_S, **one, is_timed=False)
        for driver, _ in sent:
            driver.receive()
    found = [drivers[0].call("measure", TIMEOUT_S, **one, is_timed=True) for one in arguments]
    seconds = {tile: one["seconds"] for tile, one in zip(tried, found, strict=True) if "seconds" in one}
    chosen = drivers[0].call("measure", TIMEOUT_S, **arguments[0] | {"config": None}, is_timed=True)
    if not seconds or "seconds" not in chosen:
        raise BenchmarkError(f"{case.shown}: no tile can be launched: {found[0].get('error')}")
    best = min(seconds, key=lambda tile: seconds[tile])
    floor_s = chosen["num_active"] * case.num_weights * case.num_inputs / rate
    note(
        f"{case.shown}: {best} {seconds[best] * 1e6:.1f} µs, chosen {chosen['seconds'] * 1e6:.1f}, {floor_s * 1e6:.1f}"
    )
    statement = f"reading {chosen['num_active']:.0f} experts"
    samples = {"chosen": [chosen["seconds"] * 1e6], "best": [seconds[best] * 1e6]}
    limit = Limit(value=floor_s * 1e6, statement=statement)
    return Measurement(name=case.shown, unit="µs", higher_is_better=False, samples=samples, limit=limit), best


def _lines(best: dict[ExpertsCase, DotConfig]) -> Iterator[str]:
    for shape in dict.fromkeys(case.shape for case in best):
        yield f"    {shape}: {{"
        for case, tile in best.items():
            if case.shape == shape:
                places = f"{tile.block_weights}, {tile.block_inputs}, {tile.num_warps}, {tile.num_stages}, 1"
                yield f"        {case.num_tokens}: DotConfig({places}, block_rows={tile.block_rows}),"
        yield "    },"
