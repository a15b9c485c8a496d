"""The model of times of `dot_kernel` against points that a GPU measured: what it chooses is near the fastest."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import H200, fastest_dot

ROWS = 8
DATA = Path(__file__).parents[1] / "data" / "skinny_linear_points.json"
LINEARS = json.loads(DATA.read_text())["linears"]


def measured(linear):
    """Microseconds by tile and splits; of those with and without prefetched weights the shorter ones."""
    times = {}
    for *tile, _, us in linear["points"]:
        config = DotConfig(*tile, prefetched_inputs=512)
        times[config] = min(us, times.get(config, us))
    return times


def weights_of(linear):
    return linear["num_outputs"] * (2 if linear["is_gated"] else 1), linear["num_inputs"]


def test_the_chosen_tile_is_near_the_fastest():
    ratios = []
    for linear in LINEARS:
        times = measured(linear)
        chosen = replace(fastest_dot(*weights_of(linear), ROWS), prefetched_inputs=512)
        ratios.append(times[chosen] / min(times.values()))
    assert statistics.mean(ratios) < 1.05
    assert max(ratios) < 1.25


def test_times_are_about_right():
    errors = [
        abs(H200.seconds(config, *weights_of(linear), ROWS) * 1e6 / us - 1)
        for linear in LINEARS
        for config, us in measured(linear).items()
    ]
    assert statistics.median(errors) < 0.1


def test_few_outputs_are_split_over_the_inputs():
    assert fastest_dot(2560, 9728, ROWS).splits == 3  # 120 programs on 132 multiprocessors
    assert fastest_dot(19456, 2560, ROWS).splits == 1
