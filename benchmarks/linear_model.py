"""How long a linear takes, by a model of bytes, programs, waves and boundaries, fitted to measured points.

    seconds = max(bytes * s_a_byte, waves * (s_a_wave + bytes of a program * s_a_program_byte)) + boundary_s

The first term is the memory's, the second that of multiprocessors which wait for their programs one wave after the
other; the boundary is what a launch costs beside its neighbours in a CUDA graph. Each kernel has parameters of its own;
of cuBLAS neither programs nor waves are known, so its second term is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.linear_points import Point

__all__ = ["KernelTimes", "fit", "largest_error"]

_MAX_STEPS = 50


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The parameters of one kernel, all seconds."""

    s_a_byte: float
    s_a_wave: float
    s_a_program_byte: float
    boundary_s: float

    def seconds(self, num_bytes: int, programs: int, waves: int) -> float:
        return max(self.memory_s(num_bytes), self.waves_s(num_bytes, programs, waves)) + self.boundary_s

    def memory_s(self, num_bytes: int) -> float:
        return num_bytes * self.s_a_byte

    def waves_s(self, num_bytes: int, programs: int, waves: int) -> float:
        if not programs:
            return 0.0
        return waves * (self.s_a_wave + num_bytes / programs * self.s_a_program_byte)


def fit(points: Iterable[Point]) -> dict[str, KernelTimes]:
    """By kernel, of the points that have a time; the squares of relative errors are least."""
    by_kernel: dict[str, list[Point]] = {}
    for point in points:
        if point.seconds is not None:
            by_kernel.setdefault(point.kernel, []).append(point)
    return {kernel: _fit_one(rows) for kernel, rows in by_kernel.items()}


def largest_error(times: Mapping[str, KernelTimes], points: Iterable[Point]) -> float:
    """Of the model against the points, as a share of the measured time."""
    errors = [
        abs(times[point.kernel].seconds(point.num_bytes, point.programs, point.waves) / point.seconds - 1)
        for point in points
        if point.seconds is not None
    ]
    return max(errors, default=0.0)


def _fit_one(points: Sequence[Point]) -> KernelTimes:
    """Each point is bound by memory or by waves: as the parameters so far say, until none changes sides. Begins with
    every share of the points, by bytes of a wave, as those of the memory, and keeps the best end."""
    order = np.argsort([point.num_bytes / max(point.waves, 1) for point in points])
    ends = []
    for quarter in range(5):
        of_memory = np.zeros(len(points), bool)
        of_memory[order[len(points) * quarter // 4 :]] = True
        times = _settled(points, of_memory)
        ends.append((_squares(times, points), times))
    return min(ends, key=lambda end: end[0])[1]


def _settled(points: Sequence[Point], of_memory: np.ndarray) -> KernelTimes:
    of_memory = of_memory | np.array([not point.programs for point in points])
    for _ in range(_MAX_STEPS):
        times = _least_squares(points, of_memory)
        sides = np.array([_is_of_memory(times, point) for point in points])
        if (sides == of_memory).all():
            break
        of_memory = sides
    return times


def _is_of_memory(times: KernelTimes, point: Point) -> bool:
    return times.memory_s(point.num_bytes) >= times.waves_s(point.num_bytes, point.programs, point.waves)


def _least_squares(points: Sequence[Point], of_memory: np.ndarray) -> KernelTimes:
    """None below 0: a column whose parameter would be is left out."""
    seconds = np.array([point.seconds for point in points], float)
    columns = np.zeros((len(points), 4))
    for row, point, is_of_memory in zip(columns, points, of_memory, strict=True):
        if is_of_memory:
            row[:] = point.num_bytes, 0, 0, 1
        else:
            row[:] = 0, point.waves, point.waves * point.num_bytes / point.programs, 1
    scale = np.abs(columns).max(0)
    kept = scale > 0
    found = np.zeros(4)
    while kept.any():
        relative = columns[:, kept] / scale[kept] / seconds[:, None]
        found[:] = 0
        found[kept] = np.linalg.lstsq(relative, np.ones(len(points)), rcond=None)[0] / scale[kept]
        if (found >= 0).all():
            break
        kept = kept & (found > 0)
    return KernelTimes(*map(float, found))


def _squares(times: KernelTimes, points: Sequence[Point]) -> float:
    errors = (
        times.seconds(point.num_bytes, point.programs, point.waves) / point.seconds - 1
        for point in points
        if point.seconds is not None
    )
    return sum(error**2 for error in errors)
