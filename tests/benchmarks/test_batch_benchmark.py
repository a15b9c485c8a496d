"""The benchmark of the batch runner, small."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.batch import BatchRunner
from benchmarks.harness import Plan


@pytest.mark.long_form
def test_all_of_it_is_measured(tmp_path):
    options = argparse.Namespace(requests=6, new_tokens=2, done_lines=40, real=False)
    findings = BatchRunner().run(Plan([], tmp_path, 1, options))
    beside, resumed = findings.measurements
    assert {name: len(samples) for name, samples in beside.samples.items()} == {"ringcore batch": 1, "LLM.generate": 1}
    assert len(resumed.samples["ringcore batch"]) == 1
    as_given, by_prefix = (check.data for check in findings.checks)
    assert as_given < 0.1
    assert by_prefix > 0.5
