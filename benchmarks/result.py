"""What a run leaves behind: every raw sample, and under which conditions it was taken. Statistics are derived later."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.driver import BenchmarkError

__all__ = ["Check", "Findings", "Limit", "Measurement", "Result", "read_result", "write_result"]


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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    command: str
    date: str  # UTC, ISO 8601
    commit: str
    machine: dict[str, Any]
    rounds: int
    findings: Findings


def write_result(path: Path, result: Result) -> None:
    """Writes `path` whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
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


def read_result(path: Path) -> Result:
    """Raises `BenchmarkError` naming the file and the field where it is not a result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(
            f"{path}: not a benchmark result ({error}); run the benchmark again", path=str(path)
        ) from error
