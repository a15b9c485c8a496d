"""Every linear of published models by each kernel and tile, and a model of their times."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu import measure_ceilings
from benchmarks.gpu_options import Deadline, add_place_arguments
from benchmarks.harness import Benchmark, Plan, note
from benchmarks.linear_model import choice_ratios, fit
from benchmarks.linear_points import LinearCase, Point, Points, cases_of, footprint, read_points
from benchmarks.models import DEFAULT_MODELS, MODELS, find_published
from benchmarks.result import Check, Findings, Limit, Measurement, write_json
from ringcore.kernels.linears import skinny_configs
from ringcore.kernels.linears.tma_configs import choose_on_hopper
from ringcore.kernels.search.tile_candidates import Kernel, first_kernels, near

__all__ = ["GpuLinears"]

TIMEOUT_S = 120.0
ROWS = (1, 8, 32, 64)
POINTS = Path("linear_points.json")
_ENOUGH = 0.99  # of the time before: a step of the search that gains less is its last


class GpuLinears(Benchmark):
    """Time of linears by kernel and tile against only reading the weights; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 1

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        default = ",".join(DEFAULT_MODELS)
        parser.add_argument("--models", default=default, help=f"some of {','.join(MODELS)} (default: {default})")
        parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows (default: 1,8,32,64)")
        parser.add_argument("--steps", type=int, default=2, help="of the search from each first kernel (default: 2)")
        parser.add_argument(
            "--points", type=Path, default=POINTS, metavar="FILE", help="every point; one that is there stays"
        )
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        cases = cases_of(find_published(options.models), [int(rows) for rows in options.rows.split(",")])
        known, ceilings = read_points(options.points), measure_ceilings(options.device, options.dtype)
        with Driver("linears", (sys.executable, "-m", "benchmarks.peers.linears")) as driver:
            facts = driver.call("load", TIMEOUT_S, device=options.device, dtype=options.dtype)
            of_device = facts["device"], facts["num_sms"], ceilings.read_bytes_per_s
            fresh = Points(*of_device, has_wgmma=facts["has_wgmma"])
            if known is not None and known.device != fresh.device:
                raise BenchmarkError(f"{options.points}: its points are of {known.device}, this is {fresh.device}")
            search = _Search(_by(driver), known or fresh, options.points, Deadline(options.seconds))
            for case in cases:
                search.at(case, options.steps)
        return _findings(cases, search.points, facts)


Measure = Callable[[LinearCase, str, dict[str, Any]], dict[str, Any]]  # case, kernel, config -> seconds, or error


def _by(driver: Driver) -> Measure:
    def measure(case: LinearCase, kernel: str, config: dict[str, Any]) -> dict[str, Any]:
        arguments = {"case": msgspec.to_builtins(case), "kernel": kernel, "config": config}
        return dict(driver.call("measure", TIMEOUT_S, **arguments))

    return measure


class _Search:
    """Measures what is not known yet, and writes each point as it comes."""

    def __init__(self, measure: Measure, points: Points, path: Path, deadline: Deadline) -> None:
        self.points = points
        self._measure, self._path, self._deadline, self._is_late = measure, path, deadline, False
        self._known = {(point.case, point.kernel, _frozen(point.config)): point for point in points.points}

    def at(self, case: LinearCase, steps: int) -> None:
        """From each first kernel to the best of its neighbours, as long as that gains, but `steps` times at most."""
        for kernel in first_kernels(case, _chosen(case, self.points)):
            best, best_s = kernel, self._time(case, kernel)
            for _ in range(steps):
                found = {one: self._time(case, one) for one in near(best, case)}
                if not found or min(found.values()) > _ENOUGH * best_s:
                    break
                best = min(found, key=lambda one: found[one])
                best_s = found[best]

    def _time(self, case: LinearCase, kernel: Kernel) -> float:
        """Infinite where it cannot be launched, or there is no time left to try."""
        config = {} if kernel is None else dataclasses.asdict(kernel)
        name, programs, waves = footprint(kernel, case, self.points.num_sms)
        key = case, name, _frozen(config)
        if key not in self._known:
            self._is_late = self._is_late or not self._deadline.allows(f"what is left, from {case.shown} on")
            if self._is_late:
                return float("inf")
            self._known[key] = self._measured(case, name, config, programs, waves)
            self.points = msgspec.structs.replace(self.points, points=list(self._known.values()))
            write_json(self._path, self.points)
        seconds = self._known[key].seconds
        return float("inf") if seconds is None else seconds

    def _measured(self, case: LinearCase, name: str, config: dict[str, Any], programs: int, waves: int) -> Point:
        floor_s = case.weight_bytes / self.points.read_bytes_per_s
        point = Point(case, name, config, case.weight_bytes, programs, waves, None, None)
        found = self._measure(case, name, config)
        seconds = found.get("seconds")
        if seconds is None:
            note(f"{case.shown}: {name} {config}: {found['error']}")
            return msgspec.structs.replace(point, error=found["error"])
        note(f"{case.shown}: {name} {config} {seconds * 1e6:.1f} µs, {floor_s / seconds:.0%} of the floor")
        return msgspec.structs.replace(point, seconds=seconds, floor_share=floor_s / seconds)


def _chosen(case: LinearCase, points: Points) -> Kernel:
    """By the engine."""
    choose = choose_on_hopper if points.has_wgmma else skinny_configs.choose
    return choose(case.num_outputs, case.num_inputs, case.num_rows, is_gated=case.is_gated)


def _frozen(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(config.items()))


def _findings(cases: list[LinearCase], points: Points, facts: dict[str, Any]) -> Findings:
    """Of each case the engine's choice and the best, and how far the model is from all."""
    measurements, measured = [], [point for point in points.points if point.seconds is not None]
    for case in cases:
        chosen = _chosen(case, points)
        name, config = footprint(chosen, case, 1)[0], {} if chosen is None else dataclasses.asdict(chosen)
        of_case = {(p.kernel, _frozen(p.config)): p.seconds for p in measured if p.case == case and p.seconds}
        if (name, _frozen(config)) in of_case:
            samples = {"chosen": [of_case[name, _frozen(config)] * 1e6], "best": [min(of_case.values()) * 1e6]}
            floor = case.weight_bytes / points.read_bytes_per_s * 1e6
            limit = Limit(value=floor, statement=f"reading the weights at {points.read_bytes_per_s / 1e12:.2f} TB/s")
            measurements.append(
                Measurement(name=case.shown, unit="µs", higher_is_better=False, samples=samples, limit=limit)
            )
    if not measurements:
        raise BenchmarkError("nothing was measured")
    engine = {"python": facts["python"], "packages": facts["packages"], "settings": {}, "env": {}}
    return Findings(
        measurements=measurements,
        engines={"chosen": engine, "best": engine},
        conditions=[
            "One linear at a time, calls one after the other in a CUDA graph, over copies of the weight that do not "
            "fit the L2 together; each result is compared with the product in float32 before it is timed.",
            "Chosen: the kernel and tile that the engine takes; best: of those that were tried.",
        ],
        checks=_of_model(measured),
    )


def _of_model(points: list[Point]) -> list[Check]:
    """The engine's model of times, fitted to these points."""
    times = fit(points)
    if times is None:
        return []
    ratios = choice_ratios(times, points)
    value = f"{statistics.fmean(ratios):.2f} times the fastest's time on average, {max(ratios):.2f} at most"
    return [Check(name="the tiles that the fitted model of times chooses", value=value, data=dataclasses.asdict(times))]
