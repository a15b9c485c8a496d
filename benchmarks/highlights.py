"""The README's small table and its chart: a few measurements against vLLM, taken from the results as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from benchmarks.driver import BenchmarkError
from benchmarks.result import Measurement, Result
from benchmarks.stats import number, pairwise_ratios, summarize

__all__ = ["HIGHLIGHTS", "Highlight", "chart", "table"]

PEER = "vllm"
_WIDTH, _ROW, _LABEL, _SCALE = 760, 30, 300, 85  # pixels; the last: of a ratio of 1
_OURS, _THEIRS, _TEXT = "#2f6f4f", "#c9c9c9", "#808080"


class Highlight(NamedTuple):
    """label: the README's name for the measurement `name` of the result `benchmark`; peer: the other engine."""

    label: str
    benchmark: str
    name: str
    peer: str = PEER


HIGHLIGHTS = (
    Highlight("Qwen3-8B, batch 1, one decode step", "gpu", "Qwen3-8B, batch 1 (128 in, 512 out), a step"),
    Highlight("Qwen3-8B, batch 32, one decode step", "gpu", "Qwen3-8B, batch 32 (1,024 in, 256 out), a step"),
    Highlight("Qwen3-8B, offline, 256 requests", "gpu", "Qwen3-8B, offline, 256 requests, output"),
    Highlight("Qwen3-8B, 2 GPUs, batch 1", "gpu", "Qwen3-8B on 2 devices, batch 1 (128 in, 512 out), a step"),
    Highlight("Qwen3-8B, long prompts (prefill)", "gpu", "Qwen3-8B, prefill of 64 prompts of 4,095 tokens, prompts"),
    Highlight("Qwen3-0.6B, batch 1, one decode step", "gpu", "Qwen3-0.6B, batch 1 (128 in, 512 out), a step"),
    Highlight("Qwen3-0.6B, offline, 256 requests", "gpu", "Qwen3-0.6B, offline, 256 requests, output"),
    Highlight("service at saturation, Qwen3-0.6B", "gpu_service", "saturation, requests"),
    Highlight("process start to first token, warm", "gpu_startup", "Qwen3-0.6B, warm, process start to first token"),
    Highlight("2 CPU cores, SmolLM2-135M, batch 1", "throughput", "batch 1", "vllm compiled"),
)


def table(results: Mapping[str, Result]) -> str:
    """`HIGHLIGHTS` as Markdown that ends in a newline. Raises `BenchmarkError` where one is not measured."""
    lines = ["| | ringcore | vLLM | ratio |", "| --- | --: | --: | --: |"]
    for highlight, measurement in _found(results):
        engines = _ours(measurement), highlight.peer
        ours, theirs = (summarize(measurement.samples[engine]).median for engine in engines)
        unit = measurement.unit
        lines.append(
            f"| {highlight.label} | {number(ours)} {unit} | {number(theirs)} {unit} | "
            f"{number(_ratio(highlight, measurement))}x |"
        )
    return "\n".join(lines) + "\n"


def chart(results: Mapping[str, Result]) -> str:
    """The same ratios as bars, as an SVG: 1 is vLLM, more is faster."""
    found = _found(results)
    height = _ROW * (len(found) + 1) + 14
    top = _ROW
    one = _LABEL + _SCALE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Speed of ringcore relative to vLLM (1 is vLLM, more is faster)</title>",
        f'<text x="{one}" y="18" fill="{_TEXT}" text-anchor="middle">vLLM = 1</text>',
    ]
    for index, (highlight, measurement) in enumerate(found):
        y, ratio = top + index * _ROW, _ratio(highlight, measurement)
        width = round(min(ratio * _SCALE, _WIDTH - _LABEL - 50), 1)
        parts += [
            f'<text x="{_LABEL - 10}" y="{y + 19}" fill="{_TEXT}" text-anchor="end">{escape(highlight.label)}</text>',
            f'<rect x="{_LABEL}" y="{y + 6}" width="{width}" height="18" fill="{_OURS if ratio >= 1 else _THEIRS}"/>',
            f'<text x="{_LABEL + width + 6}" y="{y + 19}" fill="{_TEXT}">{ratio:.2f}x</text>',
        ]
    parts += [
        f'<line x1="{one}" x2="{one}" y1="24" y2="{height - 6}" stroke="{_TEXT}" stroke-dasharray="3 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _found(results: Mapping[str, Result]) -> Sequence[tuple[Highlight, Measurement]]:
    found = []
    for highlight in HIGHLIGHTS:
        result = results.get(highlight.benchmark)
        measurements = [] if result is None else result.findings.measurements
        one = next((m for m in measurements if m.name == highlight.name and highlight.peer in m.samples), None)
        if one is None:
            raise BenchmarkError(
                f"highlight {highlight.label!r}: no result of {highlight.benchmark!r} has {highlight.name!r} beside "
                f"{highlight.peer!r}; measure it, or change HIGHLIGHTS"
            )
        found.append((highlight, one))
    return found


def _ours(measurement: Measurement) -> str:
    return next(iter(measurement.samples))


def _ratio(highlight: Highlight, measurement: Measurement) -> float:
    ours, theirs = measurement.samples[_ours(measurement)], measurement.samples[highlight.peer]
    return summarize(pairwise_ratios(ours, theirs, higher_is_better=measurement.higher_is_better)).median
