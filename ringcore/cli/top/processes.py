"""The panel of an engine's processes: CPU, memory and GPU of the engine and of each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rich.text import Text

from ringcore.cli.top.figures import UNKNOWN, plain, share, size
from ringcore.cli.top.monitor import View
from ringcore.cli.top.sample import Sample

__all__ = ["processes"]


class _Process(NamedTuple):
    """cpu: its share of a core. usage, memory: as a `WorkerSample` has them."""

    name: str
    cpu: float | None
    usage: Mapping[str, float]
    memory: Mapping[str, float]


class _Column(NamedTuple):
    """width: with the space before it."""

    name: str
    width: int
    cell: Callable[[_Process], str]
    is_of_gpu: bool = False


_COLUMNS = (
    _Column("CPU", 6, lambda one: share(one.cpu)),
    _Column("resident", 10, lambda one: size(one.usage.get("resident_bytes"))),
    _Column("GPU", 5, lambda one: _percent(one.usage.get("gpu_percent")), True),
    _Column("GPU memory", 15, lambda one: _of(one.usage.get("gpu_used_bytes"), one.usage.get("gpu_total_bytes")), True),
    _Column("KV cache", 10, lambda one: size(one.memory.get("kv_cache_bytes"))),
    _Column("weights", 10, lambda one: size(one.memory.get("weights_bytes"))),
    _Column("power", 7, lambda one: _watts(one.usage.get("gpu_power_w")), True),
)


def processes(view: View, sample: Sample, width: int, height: int) -> list[Text]:
    """A line for the engine and each worker; as many columns as fit, those of GPUs only where there is one."""
    has_gpu = any("gpu_total_bytes" in worker.usage for worker in sample.workers)
    columns, left = [], width - 9
    for column in _COLUMNS:
        if (has_gpu or not column.is_of_gpu) and column.width <= left:
            columns.append(column)
            left -= column.width
    lines = [Text(" " * 9 + "".join(f"{c.name:>{c.width}}" for c in columns), style="grey58")]
    for one in _processes(view, sample):
        lines.append(Text(f"{one.name:<9}" + "".join(f"{c.cell(one):>{c.width}}" for c in columns)))
    if sample.workers_error is not None:
        lines.append(Text(plain(f"workers: {sample.workers_error}", width), style="bold yellow"))
    return lines


def _processes(view: View, sample: Sample) -> list[_Process]:
    engine, pace = sample.engine, view.pace
    of_engine = {"resident_bytes": engine.resident_bytes}
    found = [_Process("engine", None if pace is None else pace.engine_cpu, of_engine, {})]
    for worker in sample.workers:
        cpu = None if pace is None else pace.worker_cpu.get(worker.rank)
        found.append(_Process(f"worker {worker.rank}", cpu, worker.usage, worker.memory))
    return found


def _percent(value: float | None) -> str:
    return share(None if value is None else value / 100)


def _of(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or whole is None else f"{size(part)} ({share(part / whole)})"


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"
