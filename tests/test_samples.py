"""A sample of cases leaves no value out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from samples import mark_samples, sampled


def everyday(params: list) -> list[tuple]:
    return [param.values for param in params if not param.marks]


def test_a_sample_has_every_value() -> None:
    axes = [1, 2, 3], [None, "a"], [(4, 5), (6,), (), (7,)]
    cases = [*itertools.product(*axes)]
    params = sampled(cases)
    assert [param.values for param in params] == cases
    chosen = everyday(params)
    assert [{*column} for column in zip(*chosen, strict=True)] == [{*axis} for axis in axes]
    assert len(chosen) == 4
    assert everyday(sampled(["x", "y"])) == [("x",), ("y",)]


class Item:
    """A test as pytest collects it, as far as a sample asks."""

    def __init__(self, nodeid: str, params: dict[str, int], *marks: pytest.Mark) -> None:
        self.nodeid, self.callspec, self.marks = nodeid, SimpleNamespace(params=params), list(marks)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks.append(decorator.mark)


def test_tests_with_the_mark_have_every_value_of_each_parameter() -> None:
    marks = [pytest.mark.parametrize("a", ...).mark, pytest.mark.parametrize(("b", "c"), ...).mark]
    skipped = pytest.mark.skipif(True, reason="no GPU").mark
    params = [{"a": a, "b": b, "c": b + c, "d": d} for a in range(4) for b in range(3) for c in (0, 1) for d in "xy"]
    # Of the first test, the last value of `b` is skipped here whatever is asked for.
    marks_of = [[*marks, pytest.mark.sampled.mark, *[skipped] * (each["b"] == 2)] for each in params]
    one = [Item(f"f::one[{i}]", each, *marks_of[i]) for i, each in enumerate(params)]
    whole = [Item(f"f::whole[{i}]", each, *marks) for i, each in enumerate(params)]
    mark_samples([*one, *whole])
    assert not any(item.get_closest_marker("long_form") for item in whole)
    left = [item for item in one if not item.get_closest_marker("long_form")]
    kept = [item.callspec.params for item in left if skipped not in item.marks]
    assert len(kept) == 4
    assert {each["a"] for each in kept} == {0, 1, 2, 3}
    assert {(each["b"], each["c"]) for each in kept} == {(0, 0), (0, 1), (1, 1), (1, 2)}
    assert {each["d"] for each in kept} == {"x", "y"}
