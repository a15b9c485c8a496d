"""A turn found beyond the device: a short run of the benchmark on a tiny model."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import Plan
from benchmarks.stored_kv import DIRECTORY, MEMORY, NONE, StoredKV


def test_a_short_run(make_plan: Callable[..., Plan]) -> None:
    place = {"device": "cpu", "dtype": "float32", "executor": "uniproc"}
    found = StoredKV().run(make_plan(rounds=1, shape="tiny", tokens=96, **place))
    for one in found.measurements:
        assert one.samples.keys() == {NONE, MEMORY, DIRECTORY}
        assert all(0 < value < 60 for values in one.samples.values() for value in values)
    checks = {check.name: check.data for check in found.checks}
    for name in (MEMORY, DIRECTORY):
        assert checks[f"tokens with {name} and without are equal"]
        assert checks[f"tokens found in {name}, the least of all rounds"] >= 80
        assert checks[f"found in {name}, times faster than computed"] > 0
