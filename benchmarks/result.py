"""What a run leaves behind: every raw sample, and under which conditions it was taken. Statistics are derived later."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.driver import BenchmarkError

__all__ = [
    "FAILED",
    "Check",
    "EarlierRun",
    "Findings",
    "Limit",
    "Measurement",
    "Result",
    "merge_results",
    "read_result",
    "with_condition",
    "write_json",
    "write_result",
]

FAILED = " failed, "  # in the name of a check: between who, and at what


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The best value that the hardware allows, in the measurement's unit, and how it is reckoned."""

    value: float
    statement: str


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity: per engine, a sample a counted round, in the order of the rounds."""

    name: str
    unit: str
    higher_is_better: bool
    samples: dict[str, list[float]]
    limit: Limit | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A fact beside the numbers, e.g. how many tokens two engines agree on; `data` holds what it was counted from."""

    name: str
    value: str
    data: Any = None


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark itself has to say; the harness adds machine, code and command."""

    measurements: list[Measurement]
    engines: dict[str, dict[str, Any]]  # name -> its Python and packages; the first is ringcore
    conditions: list[str]  # sentences
    checks: list[Check] = []


class EarlierRun(msgspec.Struct, frozen=True):
    """Where measurements are from that a result took over."""

    command: str
    date: str  # UTC, ISO 8601
    commit: str
    machine: dict[str, Any]
    measurements: list[str]  # their names


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    benchmark: str
    command: str
    date: str  # UTC, ISO 8601
    commit: str
    machine: dict[str, Any]
    rounds: int
    findings: Findings
    earlier: list[EarlierRun] = []


def write_result(path: Path, result: Result) -> None:
    write_json(path, result)


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Writes `path` whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def with_condition(result: Result, sentence: str) -> Result:
    findings = result.findings
    findings = msgspec.structs.replace(findings, conditions=[*findings.conditions, sentence])
    return msgspec.structs.replace(result, findings=findings)


def merge_results(old: Result, new: Result) -> Result:
    """`new`, after the measurements of those cases of `old` that it did not measure again; `earlier` tells of which run
    they are. A case is what stands before the last comma of a measurement's name.

    Raises `BenchmarkError` where they are not of one benchmark.
    """
    if old.benchmark != new.benchmark:
        raise BenchmarkError(f"a result of {old.benchmark!r} and one of {new.benchmark!r}; give another --json FILE")
    again = {_case(measurement.name) for measurement in new.findings.measurements}
    kept = [measurement for measurement in old.findings.measurements if _case(measurement.name) not in again]
    told = {name for run in old.earlier for name in run.measurements}
    own = [measurement.name for measurement in kept if measurement.name not in told]
    runs = [*old.earlier, EarlierRun(old.command, old.date, old.commit, old.machine, own)]
    still = [
        msgspec.structs.replace(r, measurements=[n for n in r.measurements if _case(n) not in again]) for r in runs
    ]
    names = {check.name for check in new.findings.checks}
    checks = [check for check in old.findings.checks if check.name not in names and not _is_settled(check, again)]
    measurements = kept + new.findings.measurements
    measured = {engine for measurement in measurements for engine in measurement.samples} | set(new.findings.engines)
    engines = old.findings.engines | new.findings.engines
    findings = Findings(
        measurements=measurements,
        engines={name: facts for name, facts in engines.items() if name in measured},
        conditions=list(dict.fromkeys(old.findings.conditions + new.findings.conditions)),
        checks=checks + new.findings.checks,
    )
    return msgspec.structs.replace(new, findings=findings, earlier=[run for run in still if run.measurements])


def _case(measurement: str) -> str:
    return measurement.rpartition(", ")[0] or measurement


def _is_settled(check: Check, measured: set[str]) -> bool:
    """Whether it tells of a failure at a case, or a group of cases, that has been measured since."""
    _, failed, what = check.name.partition(FAILED)
    return bool(failed) and any(name.startswith(what) for name in measured)


def read_result(path: Path) -> Result:
    """Raises `BenchmarkError` naming the file and the field where it is not a result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(
            f"{path}: not a benchmark result ({error}); run the benchmark again", path=str(path)
        ) from error
