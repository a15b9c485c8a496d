"""Turns results into Markdown tables, and keeps those in the documents equal to the results.

In a document, everything between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` belongs to the report, and so does
the chart of the highlights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS, accuracy, highlights
from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.result import EarlierRun, Measurement, Result, read_result
from benchmarks.stats import Summary, number, pairwise_ratios, summarize

__all__ = ["DOCUMENTS", "RESULTS", "outdated", "read_results", "render", "replace_tables", "update"]

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "RESULTS.md",
    ROOT / "docs" / "guide" / "quantization.md",
    ROOT / "docs" / "images" / "speed.svg",
)
RESULTS = ROOT / "benchmarks" / "results"
# Sections with tables of their own.
_TABLES: Mapping[str, Callable[[Mapping[str, Result]], str]] = {
    "highlights": highlights.table,
    "accuracy_of_schemes": accuracy.table,
}
_OPENING, _CLOSING = "<!-- benchmark:", "<!-- /benchmark -->"
_SECTION = re.compile(
    rf"(?P<open>^{_OPENING}(?P<name>\w+) -->\n)(?P<body>(?:(?!{_OPENING}).)*?)(?P<close>^{_CLOSING}$)", re.S | re.M
)


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every benchmark's result in `folder`, by the benchmark's name. Raises `BenchmarkError` where two are of one."""
    results: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        result = read_result(path)
        if result.benchmark in results:
            raise BenchmarkError(f"{path}: a second result of {result.benchmark!r}; keep one of them", path=str(path))
        results[result.benchmark] = result
    return results


def outdated(documents: Sequence[Path], results: Mapping[str, Result]) -> list[Path]:
    """The documents whose tables, or whose chart, are not what the results say."""
    return [path for path in documents if not path.exists() or path.read_text() != _written(path, results)]


def update(documents: Sequence[Path], results: Mapping[str, Result]) -> list[Path]:
    """Writes the tables; returns the documents that changed."""
    changed = outdated(documents, results)
    for path in changed:
        path.write_text(_written(path, results))
    return changed


def _written(path: Path, results: Mapping[str, Result]) -> str:
    return highlights.chart(results) if path.suffix == ".svg" else replace_tables(path.read_text(), results)


def replace_tables(text: str, results: Mapping[str, Result]) -> str:
    """`text` with every section rendered anew; a benchmark without a result leaves its section empty.

    Raises `BenchmarkError` for a section of no known benchmark, or one that is not closed.
    """
    sections = list(_SECTION.finditer(text))
    if not len(sections) == text.count(_OPENING) == text.count(_CLOSING):
        raise BenchmarkError(f"a benchmark section is not closed; each needs {_OPENING}NAME --> and {_CLOSING} lines")
    for section in sections:
        if section["name"] not in (*BENCHMARKS, *_TABLES):
            raise BenchmarkError(f"section {section['name']!r} is no benchmark; there are: {', '.join(BENCHMARKS)}")

    def body(section: re.Match[str]) -> str:
        if section["name"] in _TABLES:
            return section["open"] + _TABLES[section["name"]](results) + section["close"]
        result = results.get(section["name"])
        return section["open"] + (render(result) if result else "") + section["close"]

    return _SECTION.sub(body, text)


def render(result: Result) -> str:
    """The table of a result with what is needed to judge it, as Markdown that ends in a newline."""
    findings = result.findings
    tables: dict[tuple[str, ...], list[Measurement]] = {}  # by what was measured together
    for measurement in findings.measurements:
        engines = tuple(engine for engine in findings.engines if engine in measurement.samples)
        tables.setdefault(engines, []).append(measurement)
    limits: dict[str, list[str]] = {}
    for measurement in findings.measurements:
        if measurement.limit:
            limits.setdefault(measurement.limit.statement, []).append(measurement.name)
    remarks = [
        f"Median of {_rounds(result)} counted rounds (lowest to highest); ratios round by round, above 1 is ahead.",
        *findings.conditions,
        *(f"Limit, {'; '.join(names)}: {statement}." for statement, names in limits.items()),
        *(f"{check.name[:1].upper()}{check.name[1:]}: {check.value}." for check in findings.checks),
        *(_earlier(run) for run in result.earlier),
        _machine(result),
    ]
    lines = [line for engines, rows in tables.items() for line in _table(engines, rows)]
    return "\n".join(lines + [f"- {remark}" for remark in remarks]) + "\n"


def _table(engines: tuple[str, ...], measurements: Sequence[Measurement]) -> list[str]:
    """engines: those that all of the measurements have; others are compared with the first."""
    ours, *peers = engines
    has_limit = any(measurement.limit for measurement in measurements)
    header = ["", ours, *peers, *(f"against {peer}" for peer in peers), *(["of the limit"] if has_limit else [])]
    rows = [_row(measurement, ours, peers, has_limit) for measurement in measurements]
    return [_line(header), _line(["---"] + ["--:"] * (len(header) - 1)), *map(_line, rows), ""]


def _row(measurement: Measurement, ours: str, peers: Sequence[str], has_limit: bool) -> list[str]:
    samples = measurement.samples
    cells = [f"{measurement.name}, {measurement.unit}"]
    cells += [_spread(summarize(samples[engine])) for engine in (ours, *peers)]
    for peer in peers:
        ratios = pairwise_ratios(samples[ours], samples[peer], higher_is_better=measurement.higher_is_better)
        cells.append(_spread(summarize(ratios), "x"))
    if has_limit:
        cells.append(_share(measurement, ours))
    return cells


def _share(measurement: Measurement, ours: str) -> str:
    if measurement.limit is None:
        return ""
    value, limit = summarize(measurement.samples[ours]).median, measurement.limit.value
    return f"{value / limit if measurement.higher_is_better else limit / value:.0%}"


def _rounds(result: Result) -> str:
    """Those of the run; where measurements of others stand beside its own, what they have."""
    counts = {len(samples) for one in result.findings.measurements for samples in one.samples.values()}
    if not result.earlier or len(counts) < 2:
        return str(result.rounds)
    return f"{min(counts)} to {max(counts)}"


def _earlier(run: EarlierRun) -> str:
    rows = "; ".join(run.measurements)
    return f"Of an earlier run, {run.date[:10]}, commit {run.commit}, {_device(run.machine)}: `{run.command}`: {rows}."


def _device(machine: Mapping[str, Any]) -> str:
    """The processor, and the GPUs where there are any."""
    gpus = machine.get("gpus", [])
    kinds = [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)]
    return ", ".join([*kinds, f"{machine['cpu']}, {machine['cores']} cores"])


def _machine(result: Result) -> str:
    machine, engines = result.machine, result.findings.engines
    versions = []
    for name, facts in engines.items():
        package = name.split()[0]
        listed = {k: v for k, v in facts["packages"].items() if k == "torch" or k.startswith(package)}
        settings = [f"{key}={value}" for key, value in facts["env"].items()]
        versions.append(f"{name} ({', '.join([f'{k} {v}' for k, v in listed.items()] + settings)})")
    return (
        f"{_device(machine)}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Python {machine['python']}; {'; '.join(versions)}. {result.date[:10]}, commit {result.commit}: "
        f"`{result.command}`"
    )


def _spread(summary: Summary, unit: str = "") -> str:
    return f"{number(summary.median)}{unit} ({number(summary.low)} to {number(summary.high)})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
