"""What the everyday form of a test takes of what its long form has."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def sample_of(rows: Sequence[Sequence[Hashable]]) -> set[int]:
    """The indices of rows that together have every value of each place at least once; always the same ones."""
    names = [frozenset(enumerate(row)) for row in rows]
    left, kept = set().union(*names), set[int]()
    while left:
        best = max(range(len(rows)), key=lambda index: (len(left & names[index]), -index))
        kept.add(best)
        left -= names[best]
    return kept


def sampled(cases: Iterable[Any]) -> list[Any]:
    """A parameter set for each case, a value or a tuple of them; those outside a sample are part of the long form."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = sample_of([[repr(value) for value in row] for row in rows])
    return [pytest.param(*row, marks=() if i in kept else pytest.mark.long_form) for i, row in enumerate(rows)]


def mark_samples(items: Iterable[pytest.Item]) -> None:
    """Of each test with the mark `sampled`, the combinations of its parameters outside a sample are made part of the
    long form. Not where there is a GPU, on which they take little time."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and hasattr(item, "callspec") and not _is_skipped(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        kept = sample_of([_values_of(item) for item in combinations])
        for i, item in enumerate(combinations):
            if i not in kept:
                item.add_marker(pytest.mark.long_form)


def _values_of(item: pytest.Item) -> list[Hashable]:
    """By `parametrize` that it has one of its cases of, and by fixture with parameters."""
    params = {name: repr(value) for name, value in item.callspec.params.items()}
    values: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.append(tuple(params.pop(name) for name in names))
    return values + [params[name] for name in sorted(params)]


def _is_skipped(item: pytest.Item) -> bool:
    """In any case: it would be nothing in a sample."""
    conditions = [bool(mark.args[0]) for mark in item.iter_markers("skipif") if mark.args]
    return any(conditions) or any(item.iter_markers("long_form"))


def num_examples(short: int, long: int) -> int:
    """Of Hypothesis: conftest.py derandomizes the short form."""
    return short if settings.default is not None and settings.default.derandomize else long
