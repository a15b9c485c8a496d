"""The benchmark of replicas, small."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.harness import Plan
from benchmarks.replicas import ONE, TWO, Replicas


@pytest.mark.long_form
def test_all_of_it_is_measured(tmp_path):
    options = argparse.Namespace(requests=4, new_tokens=2, conversations=12, replicas=2, shape=None)
    findings = Replicas().run(Plan([], tmp_path, 1, options))
    (measurement,) = findings.measurements
    assert {name: len(samples) for name, samples in measurement.samples.items()} == {ONE: 1, TWO: 1}
    round_robin, _, by_prefix = (check.data for check in findings.checks)
    assert by_prefix > round_robin + 0.1
