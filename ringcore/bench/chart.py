"""A load as a picture."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringcore.bench.figures import Figures
from ringcore.testing.simulation_chart import draw_distribution, new_figure, save_png

__all__ = ["draw_chart"]

_NUM_BINS = 100


def draw_chart(figures: Figures, file: str | os.PathLike[str], title: str) -> None:
    """Four panels: requests and tokens over time, and the distributions of TTFT, ITL and E2E latency. Raises
    `ConfigError`."""
    figure = new_figure()
    (over_time, ttft), (e2el, itl) = figure.subplots(2, 2)
    latencies = figures.latencies_ms()
    _draw_over_time(over_time, figures)
    for axes, name, shown in ((ttft, "ttft", "TTFT"), (itl, "itl", "ITL"), (e2el, "e2el", "E2E latency")):
        draw_distribution(
            axes, np.sort(latencies[name] / 1e3), None, f"{shown} from the scheduled time (dashed: from sent)"
        )
        if f"{name}_from_sent" in latencies:
            values = np.sort(latencies[f"{name}_from_sent"] / 1e3)
            axes.plot(values, np.arange(1, len(values) + 1) / max(len(values), 1), linestyle="--", color="tab:gray")
    itl.set_title("ITL")
    figure.suptitle(title)
    save_png(figure, file, "chart")


def _draw_over_time(axes: Any, figures: Figures) -> None:
    """Tokens of a piece of text count when it came, an equal share of its answer's each."""
    begin_s = min(record.due_s for record in figures.records)
    bins = np.linspace(0, max(figures.duration_s, 1e-9), _NUM_BINS + 1)
    width = bins[1] - bins[0]
    due, _ = np.histogram([record.due_s - begin_s for record in figures.records], bins)
    times = [at - begin_s for _, answer in figures.answers for at in answer.text_s]
    shares = [a.num_output_tokens / len(a.text_s) for _, a in figures.answers for _ in a.text_s]
    tokens, _ = np.histogram(times, bins, weights=shares)
    axes.stairs(due / width, bins, color="tab:blue")
    axes.set(xlabel="time (s)", ylabel="requests due (1/s)", title="load and output")
    axes.yaxis.label.set_color("tab:blue")
    right = axes.twinx()
    right.stairs(tokens / width, bins, color="tab:orange")
    right.set_ylabel("output (tokens/s)", color="tab:orange")
