"""Runs of GPU benchmarks where there is no GPU: a tiny model, engines without one, and what came out."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Benchmark, EngineSpec, Plan, engine_specs
from benchmarks.models import PublishedModel
from benchmarks.result import Findings
from ringcore.testing.models import tiny_model_config

CPU = ("--device", "cpu", "--dtype", "float32", "--models", "tiny", "--memory-share", "0.02")
TINY = PublishedModel("tiny", tiny_model_config(head_dim=16, max_position_embeddings=4096))


def specs_of(fake: str, *faults: str) -> list[EngineSpec]:
    """ringcore, and vllm where a fault is given for it too."""
    specs = engine_specs([f"vllm={fake}"] if len(faults) > 1 else [], "eager")
    names = zip(specs, faults, strict=True)
    return [
        EngineSpec(spec.name, (fake, *spec.command[1:]), spec.import_statement, env={"FAKE_FAULT": fault})
        for spec, fault in names
    ]


def run(
    benchmark: type[Benchmark],
    specs: list[EngineSpec],
    *arguments: str,
    rounds: int = 1,
    keep: Callable[[Findings], object] = lambda findings: None,
) -> Findings:
    parser = ArgumentParser()
    benchmark.add_arguments(parser)
    return benchmark().run(Plan(specs, Path(), rounds, parser.parse_args(arguments), keep))


def samples_of(findings: Findings) -> dict[str, dict[str, list[float]]]:
    return {f"{one.name}, {one.unit}": one.samples for one in findings.measurements}
