"""A short run of the benchmark of tracing: what it measures is there, and traced."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import tracing
from benchmarks.harness import Plan
from benchmarks.peers import null_loops
from benchmarks.tracing import OFF, ON, Tracing


@pytest.mark.long_form
def test_a_short_run(monkeypatch, tmp_path):
    monkeypatch.setattr(null_loops, "MAX_TOKENS", 32)
    monkeypatch.setattr(null_loops, "MIN_TOKENS", 8)
    monkeypatch.setattr(tracing, "REPEATS", 1000)
    monkeypatch.setattr(tracing, "PLACES", {"engine in the caller's process": False})
    found = Tracing().run(Plan([], Path(tmp_path), 2, argparse.Namespace(requests="1,3")))
    assert [one.name for one in found.measurements] == [
        f"engine in the caller's process, {requests}, a step, {clock}"
        for requests in ("1 request", "3 requests")
        for clock in ("wall", "CPU")
    ]
    for one in found.measurements:
        assert {name: len(samples) for name, samples in one.samples.items()} == {OFF: 2, ON: 2}
        assert all(sample > 0 for samples in one.samples.values() for sample in samples)
    records = [float(check.value) for check in found.checks if "records" in check.name]
    assert all(1 <= number < 2 for number in records)
