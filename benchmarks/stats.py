"""The few statistics a table shows: a median with its range, and ratios taken round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Summary", "number", "pairwise_ratios", "summarize"]


@dataclass(frozen=True, slots=True)
class Summary:
    median: float
    low: float
    high: float


def summarize(samples: Sequence[float]) -> Summary:
    """Raises `ValueError` where there are no samples."""
    if not samples:
        raise ValueError("no samples to summarize; run at least one counted round")
    return Summary(median(samples), min(samples), max(samples))


def pairwise_ratios(ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> list[float]:
    """How many times better ours is, round by round: above 1 means ahead, whichever direction is better.

    The samples of one round stand side by side in time, so what disturbs the machine for minutes cancels here,
    as it would not in a ratio of two medians. Raises `ValueError` where the rounds do not pair up.
    """
    if higher_is_better:
        return [a / b for a, b in zip(ours, theirs, strict=True)]
    return [b / a for a, b in zip(ours, theirs, strict=True)]


def number(value: float) -> str:
    """Three figures that matter, without an exponent."""
    for floor, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= floor:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}"
