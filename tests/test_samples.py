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

    def __init__(self, nodeid: str, indices: dict[str, int], *marks: pytest.Mark) -> None:
        self.nodeid, self.callspec, self.marks = nodeid, SimpleNamespace(indices=indices), list(marks)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks.append(decorator.mark)


def test_tests_with_the_mark_have_every_value_of_each_parameter() -> None:
    of_sampled, skipped = pytest.mark.sampled.mark, pytest.mark.skipif(True, reason="no GPU").mark
    indices = [{"a": a, "b": b, "c": c} for a in range(2) for b in range(3) for c in range(2)]
    # Of the first test, the last value of `b` is skipped here whatever is asked for.
    one = [Item(f"f::one[{i}]", each, of_sampled, *[skipped] * (each["b"] == 2)) for i, each in enumerate(indices)]
    whole = [Item(f"f::whole[{i}]", each) for i, each in enumerate(indices)]
    mark_samples([*one, *whole])
    assert not any(item.get_closest_marker("long_form") for item in whole)
    kept = [
        item.callspec.indices for item in one if not item.get_closest_marker("long_form") and skipped not in item.marks
    ]
    assert len(kept) == 2
    assert all({each[name] for each in kept} == {0, 1} for name in "abc")
