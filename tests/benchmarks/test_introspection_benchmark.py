"""What being asked costs an engine: a short run of the benchmark, on an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness import Plan
from benchmarks.introspection import ASKED, OURS, Introspection


@pytest.mark.long_form
def test_a_short_run(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(rounds=2, requests="3", seconds=0.0)
    found = Introspection().run(plan)
    samples: dict[str, dict[str, Any]] = {one.name: one.samples for one in found.measurements}
    assert list(samples) == ["a step's bookkeeping", "3 requests, a step", "3 requests, a snapshot"]
    assert {name: len(values) for name, values in samples["3 requests, a step"].items()} == {OURS: 2, ASKED: 2}
    assert all(0 < value < 1e5 for of_engine in samples.values() for values in of_engine.values() for value in values)
    (check,) = found.checks
    assert 0 < check.data < 0.1
    assert set(found.engines) == {OURS, ASKED}
