"""Where a step's time on the GPU goes, kernel by kernel."""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.driver import BenchmarkError
from benchmarks.gpu_options import Deadline, add_engine_arguments, gpu_specs
from benchmarks.harness import Benchmark, EngineSpec, Plan, load_engine, note, numbers
from benchmarks.models import PublishedModel, find_published
from benchmarks.peers.gpu_loops import SHARED_REQUESTS, SHARED_TOKENS, offline_lengths
from benchmarks.result import Findings, Measurement

__all__ = ["GpuProfile"]

TIMEOUT_S = 180.0
WHAT = ("decode", "prompts", "offline", "shared")
NUM_STEPS = 32
PROMPT_TOKENS = {1: 128}  # by batch; of others:
MANY_PROMPT_TOKENS = 512
NUM_PROMPT_STEPS = 4
LONG_PROMPT_TOKENS = 4095
OFFLINE_REQUESTS = 256
_LONGEST_NAME = 80
OTHERS = "all others"


@dataclass(frozen=True)
class Span:
    """What is profiled: as rows name it, and their unit, of so many microseconds."""

    name: str
    unit: str
    unit_us: float


A_STEP = Span("a step", "µs", 1.0)
ALL_REQUESTS = Span("all requests", "ms", 1e3)


@dataclass(frozen=True)
class Case:
    """A command of the child and its arguments."""

    command: str
    arguments: dict[str, Any]
    span: Span


class GpuProfile(Benchmark):
    """µs of each kernel of a step, by torch's profiler; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 1

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser)
        parser.set_defaults(models="Qwen3-0.6B")
        parser.add_argument("--batches", default="1,256", help="requests that decode (default: 1,256)")
        parser.add_argument("--what", default=",".join(WHAT), help=f"some of {','.join(WHAT)} (default: all)")
        parser.add_argument("--top", type=int, default=20, help="kernels with a row of their own (default: 20)")
        parser.add_argument("--by-place", action="store_true", help="decode steps by a kernel's place in a layer too")
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        # With --deterministic that engine comes first.
        spec, *_ = gpu_specs(replace(plan, specs=plan.specs[:1]), "profile", are_together=False)
        batches, deadline = numbers("--batches", options.batches), Deadline(options.seconds)
        kinds = options.what.split(",")
        if unknown := [kind for kind in kinds if kind not in WHAT]:
            raise BenchmarkError(f"--what {options.what}: no {unknown[0]!r}; there are: {', '.join(WHAT)}")
        measurements: list[Measurement] = []
        facts: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            for model in find_published(options.models):
                if deadline.allows(model.name):
                    cases = _cases(kinds, batches, options.by_place)
                    found, facts = _profile(spec, model, Path(folder), cases, plan.rounds, options.top)
                    measurements += found
        return Findings(
            measurements=measurements,
            engines={spec.name: facts},
            conditions=_conditions(options.dtype),
        )


def _cases(kinds: list[str], batches: list[int], by_place: bool) -> dict[str, Case]:
    """By name."""
    cases: dict[str, Case] = {}
    if "decode" in kinds:
        for batch in batches:
            tokens = PROMPT_TOKENS.get(batch, MANY_PROMPT_TOKENS)
            arguments = {"batch": batch, "prompt_tokens": tokens, "num_steps": NUM_STEPS, "by_place": by_place}
            cases[f"batch {batch}"] = Case("profile", arguments, A_STEP)
    if "prompts" in kinds:
        arguments = {"prompt_tokens": LONG_PROMPT_TOKENS, "num_steps": NUM_PROMPT_STEPS}
        cases[f"prompts of {LONG_PROMPT_TOKENS:,} tokens"] = Case("profile_prompts", arguments, A_STEP)
    if "offline" in kinds:
        lengths = [list(one) for one in offline_lengths(OFFLINE_REQUESTS)]
        cases[f"offline, {len(lengths)} requests"] = Case("profile_offline", {"lengths": lengths}, ALL_REQUESTS)
    if "shared" in kinds:
        name = f"{SHARED_REQUESTS} requests that share {SHARED_TOKENS:,} tokens"
        cases[name] = Case("profile_shared", {"num_requests": SHARED_REQUESTS}, ALL_REQUESTS)
    return cases


def _profile(
    spec: EngineSpec, model: PublishedModel, folder: Path, cases: dict[str, Case], rounds: int, top: int
) -> tuple[list[Measurement], dict[str, Any]]:
    """One engine for all cases; its rows, and its facts."""
    measurements = []
    with spec.start() as driver:
        facts = load_engine(driver, spec, model.write(folder)).facts
        for name, case in cases.items():
            shown = f"{model.name}, {name}"
            taken = []
            for round_ in range(1, rounds + 1):
                note(f"{shown}: round {round_} of {rounds}")
                taken.append(driver.call(case.command, TIMEOUT_S, **case.arguments))
            measurements += rows_of(shown, spec.name, taken, top, case.span)
    return measurements, facts


def rows_of(shown: str, engine: str, taken: list[dict[str, Any]], top: int, span: Span = A_STEP) -> list[Measurement]:
    """`span` as a whole, then its kernels by the exclusive time they took in the first round, with how often it has
    them; those after the first `top`, and any that not every round had, are one row."""

    def row(name: str, samples_us: list[float]) -> Measurement:
        samples = [us / span.unit_us for us in samples_us]
        return Measurement(name=f"{shown}, {name}", unit=span.unit, higher_is_better=False, samples={engine: samples})

    rounds = [grouped(one["kernels"]) for one in taken]
    own = [name for name in rounds[0] if all(name in kernels for kernels in rounds)][:top]
    total_us = [sum(kernel.us for kernel in kernels.values()) for kernels in rounds]
    rest_us = [total - sum(kernels[name].us for name in own) for total, kernels in zip(total_us, rounds, strict=True)]
    rows = [
        row(f"{span.name} by the clock", [one["clock_us"] for one in taken]),
        row(f"{span.name} on the device", [one["span_us"] for one in taken]),
        row("of it without a kernel", [one["span_us"] - one["busy_us"] for one in taken]),
        row(f"all {sum(kernel.launches for kernel in rounds[0].values()):.0f} kernels", total_us),
    ]
    for name in own:
        label = f"{rounds[0][name].launches:.4g} x `{name}`"
        rows.append(row(label, [kernels[name].us for kernels in rounds]))
        rows.append(row(f"{label} exclusive", [kernels[name].exclusive_us for kernels in rounds]))
    return [*rows, row(OTHERS, rest_us)] if max(rest_us) > 0 else rows


class Kernels(NamedTuple):
    """All of one name."""

    launches: float
    us: float
    exclusive_us: float


def grouped(kernels: list[tuple[str, float, float, float]]) -> dict[str, Kernels]:
    """(name, launches, microseconds, exclusive ones) by a name that fits a table, the longest first: C++ kernels lose
    their arguments."""
    found: dict[str, Kernels] = {}
    for name, *figures in kernels:
        shown = short_name(name)
        before = found.get(shown, (0.0, 0.0, 0.0))
        found[shown] = Kernels(*(one + more for one, more in zip(before, figures, strict=True)))
    return dict(sorted(found.items(), key=lambda item: -item[1].exclusive_us))


def short_name(name: str) -> str:
    """Without return type, template arguments, parameters and anonymous namespaces; with its place in a layer."""
    name, place = re.fullmatch(r"(.*?)( \+\d)?", name, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.split(r"[<(]", name, maxsplit=1)[0] or name
    return name.replace("|", "/").replace("`", "'").replace(", ", ",")[:_LONGEST_NAME].strip() + place


def _conditions(dtype: str) -> list[str]:
    return [
        f"Random weights in {dtype}; the engine and its worker in one process, {NUM_STEPS} greedy decode steps after "
        f"prompts of {PROMPT_TOKENS[1]} tokens (batch 1) or {MANY_PROMPT_TOKENS}, {NUM_PROMPT_STEPS} steps of whole "
        "prompts alone. Offline: nano-vllm's benchmark from its first request to its last token. By the clock: without "
        "the profiler.",
        "Kernels: their own durations by torch's profiler, which may overlap where one is launched before the one "
        "before it has ended; exclusive: from the end of all kernels before, so that these add up to the time in which "
        "any ran. All are of a step, or of all requests, the number before a name how often it runs there; +1 behind a "
        "name: the first kernel behind attention.",
    ]
