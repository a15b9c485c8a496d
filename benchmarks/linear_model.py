"""The engine's model of the time of a skinny linear (`kernels/linears/skinny_times.py`), fitted to measured points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from benchmarks.linear_points import LinearCase, Point
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import H200, DotTimes

__all__ = ["FittedTimes", "choice_ratios", "fit"]

_FACTORS = (1.5, 1.15, 1.04, 1.01)  # by which a constant is changed at a time, from coarse to fine
_NORM_S = 1e-6
_WIDTH = 0.05  # of an error, as a share: larger ones count linearly
_NEAR = 3  # the power with which points far from their linear's fastest count less


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """norm_s: of the norm's kernel before a linear that has one, whatever its tile."""

    dot: DotTimes
    norm_s: float

    def seconds(self, point: Point) -> float:
        case = point.case
        seconds = self.dot.seconds(DotConfig(**point.config), case.num_weights, case.num_inputs, case.num_rows)
        return seconds + (self.norm_s if case.role == "after norm" else 0.0)


def fit(points: Iterable[Point]) -> FittedTimes | None:
    """Of the tensor-core kernel, beginning with the engine's constants: each constant in turn is changed by a factor as
    long as that lowers the error. None without points of it."""
    measured = _timed(points)
    if not measured:
        return None
    fastest = _fastest(measured)
    constants = [*astuple(H200), _NORM_S]
    least = _error(constants, measured, fastest)
    for factor in _FACTORS:
        is_better = True
        while is_better:
            is_better = False
            for i, change in [(i, change) for i in range(len(constants)) for change in (factor, 1 / factor)]:
                changed = [*constants[:i], constants[i] * change, *constants[i + 1 :]]
                if (error := _error(changed, measured, fastest)) < least * (1 - 1e-6):
                    constants, least, is_better = changed, error, True
    return _times(constants)


def choice_ratios(times: FittedTimes, points: Iterable[Point]) -> list[float]:
    """Of each linear: the time of the tile that the model takes for the fastest, over that of the fastest."""
    measured = _timed(points)
    fastest = _fastest(measured)
    chosen: dict[LinearCase, Point] = {}
    for point in measured:
        if point.case not in chosen or times.seconds(point) < times.seconds(chosen[point.case]):
            chosen[point.case] = point
    return [_seconds(point) / fastest[case] for case, point in chosen.items()]


def _times(constants: Sequence[float]) -> FittedTimes:
    *dot, norm_s = constants
    return FittedTimes(DotTimes(*dot), norm_s)


def _error(constants: Sequence[float], points: Sequence[Point], fastest: dict[LinearCase, float]) -> float:
    times = _times(constants)
    return statistics.fmean(
        math.hypot(1, math.log(times.seconds(point) / _seconds(point)) / _WIDTH)
        * (fastest[point.case] / _seconds(point)) ** _NEAR
        for point in points
    )


def _timed(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if point.kernel == "dot" and point.seconds is not None]


def _fastest(points: Sequence[Point]) -> dict[LinearCase, float]:
    found: dict[LinearCase, float] = {}
    for point in points:
        found[point.case] = min(_seconds(point), found.get(point.case, math.inf))
    return found


def _seconds(point: Point) -> float:
    assert point.seconds is not None
    return point.seconds
