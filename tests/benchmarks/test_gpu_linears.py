"""What is tried of a linear, how long each is said to take, and the model of times that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gpu_runs import run

from benchmarks import gpu_linears, linear_model
from benchmarks.driver import BenchmarkError
from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_linears import GpuLinears
from benchmarks.harness import engine_specs
from benchmarks.linear_model import FittedTimes
from benchmarks.linear_points import LinearCase, Point, cases_of, footprint, read_points
from benchmarks.models import MODELS
from benchmarks.result import Findings
from ringcore.kernels.linears.skinny_configs import choose
from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig
from ringcore.kernels.linears.skinny_times import DotTimes
from ringcore.kernels.search.tile_candidates import first_kernels, near

Cost = Callable[[dict[str, Any], str, dict[str, Any]], dict[str, Any]]


class FakeDriver:
    """In place of the child: times by a formula."""

    def __init__(self, cost: Cost, device: str = "a device") -> None:
        self.cost, self.device = cost, device
        self.asked: list[tuple[dict[str, Any], str, dict[str, Any]]] = []

    def __enter__(self) -> FakeDriver:
        return self

    def __exit__(self, *error: object) -> None: ...

    def call(self, command: str, timeout_s: float, **given: Any) -> dict[str, Any]:
        if command == "load":
            return {"device": self.device, "num_sms": 100, "has_wgmma": False, "python": "3", "packages": {}}
        self.asked.append((given["case"], given["kernel"], given["config"]))
        return self.cost(*self.asked[-1])


def by_shape(case: dict[str, Any], kernel: str, config: dict[str, Any]) -> dict[str, Any]:
    """The more stages the better, but for 4 of them, which cannot be launched."""
    if config.get("num_stages") == 4:
        return {"error": "too much"}
    return {"seconds": 1e-5 / config.get("num_stages", 1) + 1e-7 * config.get("splits", 0)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[FakeDriver, Findings]]:
    monkeypatch.setattr(gpu_linears, "measure_ceilings", lambda device, dtype: Ceilings(1e12, 1e15))

    def measure(*options: str, cost: Cost = by_shape, device: str = "a device") -> tuple[FakeDriver, Findings]:
        driver = FakeDriver(cost, device)
        monkeypatch.setattr(gpu_linears, "Driver", lambda *command: driver)
        given = ("--models=Qwen3-0.6B", f"--points={tmp_path / 'points.json'}", "--rows=8", *options)
        return driver, run(GpuLinears, engine_specs([], "eager"), *given)

    return measure


@pytest.mark.long_form
def test_what_is_there_is_not_measured_again(measured: Any, tmp_path: Path) -> None:
    first, findings = measured("--steps=1")
    assert len(first.asked) == len({str(one) for one in first.asked}) > 5 * 5
    again, same = measured("--steps=1")
    assert again.asked == []
    assert same.measurements == findings.measurements
    more, _ = measured("--steps=2")
    assert len(more.asked) > 0
    with pytest.raises(BenchmarkError, match="its points are of a device, this is another"):
        measured(device="another")


def test_a_search_goes_where_it_gains(measured: Any, tmp_path: Path) -> None:
    _, findings = measured("--steps=3")
    points = read_points(tmp_path / "points.json")
    assert points is not None
    best = min((point for point in points.points if point.seconds), key=lambda point: point.seconds)
    assert best.config["num_stages"] == 3, "4 cannot be launched, so it is never beyond"
    assert best.config["splits"] == 1
    refused = [point for point in points.points if point.error]
    assert refused
    assert {(point.seconds, point.error, point.config["num_stages"]) for point in refused} == {(None, "too much", 4)}
    for one in findings.measurements:
        assert one.samples["best"][0] <= one.samples["chosen"][0]
    assert {point.floor_share for point in points.points if point.seconds} == {
        point.num_bytes / 1e12 / point.seconds for point in points.points if point.seconds
    }


@pytest.mark.long_form
def test_without_time_nothing_more_is_tried(measured: Any) -> None:
    with pytest.raises(BenchmarkError, match="nothing was measured"):
        measured("--seconds=-1")
    _, findings = measured()
    driver, later = measured("--seconds=-1")
    assert driver.asked == []
    assert [one.name for one in later.measurements] == [one.name for one in findings.measurements]


def test_a_shape_of_two_models_is_one_case() -> None:
    cases = cases_of([MODELS["Qwen3-8B"], MODELS["Granite-3.3-8B"]], [1, 64])
    assert len(cases) == len(set(cases))
    shapes = [(one.num_outputs, one.num_inputs, one.is_gated, one.role) for one in cases if one.num_rows == 1]
    assert shapes == [
        (6144, 4096, False, "after norm"),
        (4096, 4096, False, "added"),
        (12288, 4096, True, "after norm"),
        (4096, 12288, False, "added"),
        (151936, 4096, False, "plain"),
        (12800, 4096, True, "after norm"),
        (4096, 12800, False, "added"),
        (49159, 4096, False, "plain"),
    ]
    assert cases[0].weight_bytes == 6144 * 4096 * 2
    assert cases[4].weight_bytes == 2 * 12288 * 4096 * 2


def test_programs_and_waves_by_hand() -> None:
    gated = LinearCase(12288, 4096, True, "after norm", 96)
    assert footprint(DotConfig(64, 128, 4, 3, 2, block_rows=64), gated, 132) == ("dot", 384 * 2 * 2, 1)
    one = LinearCase(12288, 4096, True, "after norm", 1)
    assert footprint(FmaConfig(1, 4096, 8), one, 132) == ("fma", 12288, 12)
    assert footprint(None, one, 132) == ("cublas", 0, 0)


@pytest.mark.parametrize("rows", [1, 4, 8, 32, 64, 256])
@pytest.mark.parametrize("shape", [(4096, 1024, False), (3072, 1024, True), (1024, 3072, False), (151936, 4096, False)])
def test_all_that_is_tried_can_be_launched(rows: int, shape: tuple[int, int, bool]) -> None:
    case = LinearCase(*shape, "plain", rows)
    chosen = choose(shape[0], shape[1], rows, is_gated=shape[2])
    tried = {kernel for first in first_kernels(case, chosen) for kernel in [first, *near(first, case)]}
    assert {chosen, None} <= tried
    assert len(tried) > 5
    for kernel in tried:
        if isinstance(kernel, DotConfig):
            outputs = kernel.block_weights // (2 if case.is_gated else 1)
            assert 16 <= outputs <= 32 * kernel.num_warps
            assert rows <= 4 * kernel.block_rows
        elif kernel is not None:
            assert rows <= 4


TRUE = FittedTimes(DotTimes(3.9e12, 1.1e-6, 1.6e-6, 1.4e-6, 0.2e-6, 2.1), norm_s=2e-6)


def made_points() -> list[Point]:
    """Of `TRUE`, some bound by memory and some by multiprocessors."""
    found = []
    for outputs, role in ((1024, "added"), (4096, "after norm"), (12288, "after norm"), (50000, "plain")):
        for inputs in (1024, 4096, 12288):
            case = LinearCase(outputs, inputs, False, role, 8)
            for kernel in (DotConfig(64, *tile, splits) for tile in ((256, 4, 3), (64, 4, 3)) for splits in (1, 2, 4)):
                name, programs, waves = footprint(kernel, case, 132)
                point = Point(case, name, dataclasses.asdict(kernel), case.weight_bytes, programs, waves, None, None)
                found.append(replace_seconds(point, TRUE.seconds(point)))
    return found


def test_the_model_finds_the_times_that_made_the_points() -> None:
    points = made_points()
    unlaunched = replace_seconds(points[0], None)
    of_cublas = msgspec.structs.replace(points[0], kernel="cublas", config={}, seconds=1e-9)
    times = linear_model.fit([*points, unlaunched, of_cublas])
    assert times is not None
    errors = [times.seconds(point) / (point.seconds or 1) - 1 for point in points]
    assert max(map(abs, errors)) < 0.05
    assert times.norm_s == pytest.approx(TRUE.norm_s, rel=0.2)
    assert max(linear_model.choice_ratios(times, points)) < 1.02
    assert linear_model.fit([unlaunched, of_cublas]) is None


def test_a_model_that_is_wrong_is_seen_in_its_choice() -> None:
    points = made_points()
    free_splits = replace(TRUE, dot=replace(TRUE.dot, split_s=0.0, partial_s=0.0))
    assert max(linear_model.choice_ratios(free_splits, points)) > 1.1


def replace_seconds(point: Point, seconds: float | None) -> Point:
    return msgspec.structs.replace(point, seconds=seconds)
