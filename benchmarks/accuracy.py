"""What linear schemes and KV in FP8 change: perplexity of a text, and errors of log-probabilities against float32."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, note
from benchmarks.result import Findings, Measurement, Result

__all__ = ["SCHEMES", "Accuracy", "Scheme", "errors", "table"]

TIMEOUT_S = 600.0
PERPLEXITY, MEAN, HIGH = "perplexity", "mean error", "99th percentile of the error"


@dataclass(frozen=True)
class Scheme:
    """How a model is loaded. bits: of a code, without scales."""

    bits: int
    options: Mapping[str, Any] = field(default_factory=dict)
    gguf_type: str | None = None


# The first is the reference.
SCHEMES: Mapping[str, Scheme] = {
    "float32": Scheme(32, {"dtype": "float32"}),
    "bfloat16": Scheme(16, {"dtype": "bfloat16"}),
    'quantization="fp8"': Scheme(8, {"dtype": "float32", "quantization": "fp8"}),
    'quantization="int4"': Scheme(4, {"dtype": "float32", "quantization": "int4"}),
    'kv_cache_dtype="fp8"': Scheme(8, {"dtype": "float32", "kv_cache_dtype": "fp8"}),
    "GGUF Q8_0": Scheme(8, {"dtype": "float32"}, "Q8_0"),
    "GGUF Q5_1": Scheme(5, {"dtype": "float32"}, "Q5_1"),
    "GGUF Q5_0": Scheme(5, {"dtype": "float32"}, "Q5_0"),
    "GGUF Q4_1": Scheme(4, {"dtype": "float32"}, "Q4_1"),
    "GGUF Q4_0": Scheme(4, {"dtype": "float32"}, "Q4_0"),
}


class Accuracy(Benchmark):
    """perplexity of the project's guide, and errors of log-probabilities, by linear scheme and KV cache dtype"""

    default_rounds: ClassVar[int] = 1

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--windows", type=int, default=8, help="prompts that the text is cut into (default: 8)")
        parser.add_argument("--tokens", type=int, default=512, help="of a prompt (default: 512)")

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        specs = child_specs(plan.specs, "accuracy", "schemes")
        scores: dict[str, list[float]] = {}
        text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs" / "guide").glob("*.md")))
        with Fleet(replace(plan, specs=specs)) as fleet, fleet.turn("ringcore") as driver:
            cut = {"num_windows": options.windows, "num_tokens": options.tokens}
            windows = driver.call("windows", TIMEOUT_S, text=text, **cut)
            if not windows:
                raise BenchmarkError(f"--tokens {options.tokens}: the text has not so many; give fewer")
            for name, scheme in SCHEMES.items():
                note(f"{name}: {len(windows)} windows of {options.tokens} tokens")
                given = {"options": dict(scheme.options), "gguf_type": scheme.gguf_type}
                scores[name] = driver.call("score", TIMEOUT_S, windows=windows, **given)
        return Findings(
            measurements=[one for name in scores for one in _measurements(name, scores[name], scores["float32"])],
            engines=fleet.facts,
            conditions=[
                f"{plan.model.name}; the text is this project's guide at this commit, the first {len(windows)} windows "
                f"of {options.tokens} tokens, each a prompt. An error is the distance of a token's log-probability "
                "from that in float32, in nats.",
                "GGUF types are of the linears, written by the package `gguf` from the same folder; embedding and head "
                "are float16 there. Activations are float32 but in the row bfloat16.",
            ],
        )


def _measurements(name: str, scores: Sequence[float], reference: Sequence[float]) -> list[Measurement]:
    mean, high = errors(scores, reference)
    values = {
        PERPLEXITY: (math.exp(-math.fsum(scores) / len(scores)), "a token"),
        MEAN: (mean, "nats"),
        HIGH: (high, "nats"),
    }
    return [
        Measurement(name=f"{name}, {kind}", unit=unit, higher_is_better=False, samples={"ringcore": [value]})
        for kind, (value, unit) in values.items()
    ]


def errors(scores: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """(mean, 99th percentile) of the distances of two lists of log-probabilities of the same tokens."""
    distances = sorted(abs(one - other) for one, other in zip(scores, reference, strict=True))
    return math.fsum(distances) / len(distances), distances[math.ceil(0.99 * len(distances)) - 1]


def table(results: Mapping[str, Result]) -> str:
    """A scheme a line, as Markdown that ends in a newline; nothing where it was not measured."""
    result = results.get("accuracy")
    if result is None:
        return ""
    found = {one.name: one.samples["ringcore"][0] for one in result.findings.measurements}
    lines = ["| | bits of a code | perplexity | mean error | 99th percentile |", "|---|--:|--:|--:|--:|"]
    for name, scheme in SCHEMES.items():
        perplexity, mean, high = (found[f"{name}, {kind}"] for kind in (PERPLEXITY, MEAN, HIGH))
        name = name if '"' not in name else f"`{name}`"
        lines.append(f"| {name} | {scheme.bits} | {perplexity:.3f} | {mean:.4f} | {high:.3f} |")
    return "\n".join(lines) + "\n"
