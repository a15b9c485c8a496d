"""Plots a simulation's result as a PNG. Needs matplotlib: `pip install ringcore[simulate]`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringcore.errors import ConfigError
from ringcore.host.log_histogram import LogHistogram
from ringcore.testing.simulation_result import SimulationResult

__all__ = ["check_can_draw", "draw_distribution", "draw_png", "duration", "new_figure", "save_png"]

_NUM_BINS = 60
_MAX_DECADES = 3  # with ticks at 1, 2 and 5; more decades have theirs at 1 alone


def check_can_draw(option: str = "png", extra: str = "simulate") -> None:
    """Raises `ConfigError` with the remedy if matplotlib is not installed. extra: which has it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{option}: drawing needs matplotlib, which is not installed; pip install 'ringcore[{extra}]'",
            option=option,
            value=None,
        ) from error


def new_figure() -> Any:
    """A figure for four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # renders to memory: no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Any, file: str | os.PathLike[str], option: str) -> None:
    """Raises `ConfigError` if the file cannot be written."""
    try:
        figure.savefig(file, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(
            f"{option}={os.fspath(file)!r}: cannot be written: {error}", option=option, value=str(file)
        ) from error


def draw_png(result: SimulationResult, file: str | os.PathLike[str], title: str = "") -> None:
    """Plots four panels: requests and output tokens over time, the CDFs of TTFT and ITL, utilisation by replica.

    Raises `ConfigError` if matplotlib is not installed, or the file cannot be written.
    """
    check_can_draw()
    figure = new_figure()
    (over_time, ttft), (utilisation, itl) = figure.subplots(2, 2)
    _draw_over_time(over_time, result)
    draw_distribution(ttft, np.sort(result.ttft_s[~np.isnan(result.ttft_s)]), None, "TTFT")
    used = np.flatnonzero(result.records.itl.counts)
    values = np.array([LogHistogram.bucket_value(int(bucket)) for bucket in used])
    draw_distribution(itl, values, result.records.itl.counts[used], "time between tokens (ITL)")
    _draw_utilisation(utilisation, result)
    figure.suptitle(title)
    save_png(figure, file, "png")


def _draw_over_time(axes: Any, result: SimulationResult) -> None:
    """Rates in equal bins over the whole duration; a request's tokens count at its end."""
    records, begin = result.records, float(result.trace.time_s[0])
    bins = np.linspace(begin, begin + max(result.duration_s, 1e-9), _NUM_BINS + 1)
    width = bins[1] - bins[0]
    finished = ~np.isnan(records.finish_s)
    arrived, _ = np.histogram(result.trace.time_s, bins)
    tokens, _ = np.histogram(records.finish_s[finished], bins, weights=records.num_tokens[finished])
    axes.stairs(arrived / width, bins, color="tab:blue", fill=True, alpha=0.35)
    axes.set(xlabel="time (s)", ylabel="arrivals (requests/s)", title="load and throughput", xlim=(bins[0], bins[-1]))
    axes.yaxis.label.set_color("tab:blue")
    right = axes.twinx()
    right.stairs(tokens / width, bins, color="tab:orange", linewidth=1.5)
    right.set_ylabel("output of finished requests (tokens/s)", color="tab:orange")
    right.yaxis.set_major_formatter("{x:,.0f}")
    for one in (axes, right):
        one.set_ylim(bottom=0)


def draw_distribution(axes: Any, values: np.ndarray, counts: np.ndarray | None, name: str) -> None:
    """values: [n] ascending, in seconds, each counted once or `counts` times."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(xlabel="at most so long", ylabel="share of all (%)", title=name, ylim=(0, 102))
    if not len(values):
        return
    total = np.arange(1, len(values) + 1) if counts is None else np.cumsum(counts)
    if len(values) > 10_000:  # more points than pixels
        kept = np.unique(np.linspace(0, len(values) - 1, 10_000).astype(np.int64))
        values, total = values[kept], total[kept]
    shares = 100 * total / total[-1]
    axes.plot(values, shares)
    axes.set_xscale("log")
    num_decades = np.log10(values[-1] / values[0]) if values[0] > 0 else np.inf
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if num_decades <= _MAX_DECADES else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: duration(value))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="both", alpha=0.3)
    for share, style in ((50, ":"), (99, "--")):
        value = float(values[int(np.searchsorted(shares, share))])
        label = f"{share}%: {duration(value)}"
        axes.axvline(value, color="gray", linestyle=style, linewidth=1, label=label)
    axes.legend(loc="lower right")


def duration(seconds: float) -> str:
    """As an axis names it: 20 ms, 1.5 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def _draw_utilisation(axes: Any, result: SimulationResult) -> None:
    axes.bar(range(len(result.utilisation)), [100 * share for share in result.utilisation], width=0.9)
    axes.set(xlabel="replica", ylabel="time with work (%)", title="utilisation", ylim=(0, 102))
    axes.xaxis.get_major_locator().set_params(integer=True)
