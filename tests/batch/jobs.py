"""Jobs without an engine, and what their results say."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ringcore.batch.job import InputFacts, Job
from ringcore.batch.journal import Journal, Record
from ringcore.batch.lines import Outcome
from ringcore.batch.results import Results


def make_job(num_lines: int, compression: str = "none") -> Job:
    return Job(
        version=1,
        input=InputFacts("ab" * 32, 100),
        num_lines=num_lines,
        num_requests=num_lines,
        format="plain",
        order="completion",
        compression=compression,
        model={"model": "m"},
        defaults={},
        answers={},
    )


def outcome(line: int, is_failed: bool = False) -> Outcome:
    text = f"result of {line} " + "x" * (line * 7 % 40)
    return Outcome(Record(line, is_failed, line, 2 * line), msgspec.json.encode({"line": line, "text": text}) + b"\n")


def resume(folder: Path) -> Results:
    return Results.resume(str(folder / "out"), Journal.open(str(folder / "journal")))


def lines_of(data: bytes) -> list[int]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line)["line"] for line in data.splitlines()]
