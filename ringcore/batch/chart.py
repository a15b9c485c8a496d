"""Plots a run of a job as a PNG. Needs matplotlib: `pip install ringcore[batch]`."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np

from ringcore.batch.figures import Figures
from ringcore.errors import ConfigError

__all__ = ["check_can_draw", "draw_png"]

_MAX_BINS = 120


def check_can_draw() -> None:
    """Raises `ConfigError` with the remedy if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("chart: drawing needs matplotlib: pip install 'ringcore[batch]'", option="chart", value=None)


def draw_png(figures: Figures, file: str | os.PathLike[str], title: str = "") -> None:
    """Two panels over time: output tokens of finished requests a second, and the share of the KV cache in use.

    Raises `ConfigError` if the file cannot be written.
    """
    check_can_draw()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # renders to memory: no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    rate, usage = figure.subplots(2, 1, sharex=True)
    times = np.array([0.0, *(sample.time_s for sample in figures.samples)])
    tokens = np.array([0, *(sample.num_tokens for sample in figures.samples)])
    bins = np.linspace(0.0, max(float(times[-1]), 1e-9), min(_MAX_BINS, len(times)) + 1)
    rate.stairs(np.diff(np.interp(bins, times, tokens)) / np.diff(bins), bins, fill=True, color="tab:orange")
    rate.set(ylabel="output tokens/s", title=title, ylim=(0, None))
    usage.plot(times[1:], [100 * sample.kv_cache_usage for sample in figures.samples], color="tab:blue")
    usage.set(xlabel="time (s)", ylabel="KV cache in use (%)", ylim=(0, 102))
    for axes in (rate, usage):
        axes.grid(True, alpha=0.3)
    try:
        figure.savefig(file, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(
            f"chart={os.fspath(file)!r}: cannot be written: {error}", option="chart", value=str(file)
        ) from error
