from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from fake_engines import make_config

from ringcore.errors import ConfigError
from ringcore.testing import Simulator, StepCost, poisson_trace
from ringcore.testing.simulation_chart import check_can_draw, draw_distribution, draw_png, new_figure

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed: pip install 'ringcore[simulate]'",
)


def result_of(folder, prompt_tokens: int):
    trace = poisson_trace(30, 10.0, prompt_tokens=prompt_tokens, output_tokens=5)
    return Simulator(make_config(folder), 2, cost=StepCost(base_s=0.01), num_processes=1).run(trace)


@needs_matplotlib
@pytest.mark.parametrize("prompt_tokens", [10, 10**6], ids=["some", "all refused"])
def test_a_png(model_folder, tmp_path, prompt_tokens):
    draw_png(result_of(model_folder, prompt_tokens), tmp_path / "a.png", title="a title")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1320, 880)


@needs_matplotlib
def test_a_png_that_cannot_be_written(model_folder, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_png(result_of(model_folder, 10), tmp_path / "no" / "a.png")


def test_without_matplotlib_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ringcore\[simulate\]'"):
        check_can_draw()


@needs_matplotlib
@pytest.mark.parametrize(
    ("seconds", "ticks", "labels"),
    [
        (
            np.geomspace(0.004, 0.13, 100),
            ["5 ms", "10 ms", "20 ms", "50 ms", "100 ms"],
            ["50%: 22.4 ms", "99%: 126 ms"],
        ),
        (
            np.geomspace(1e-4, 2000, 100),
            ["100 \N{MICRO SIGN}s", "1 ms", "1 s", "1,000 s"],
            ["50%: 411 ms", "99%: 1,688 s"],
        ),
    ],
)
def test_axes_of_times_can_be_read(seconds, ticks, labels):
    figure = new_figure()
    axes = figure.subplots()
    draw_distribution(axes, seconds, None, "TTFT")
    figure.canvas.draw()
    assert set(ticks) <= {tick.get_text() for tick in axes.get_xticklabels()}
    assert not any(tick.get_text() for tick in axes.get_xticklabels(minor=True))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
