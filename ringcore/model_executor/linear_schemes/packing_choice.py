"""Which packing of a float32 matrix is the fastest on this processor: measured for its shape, once on a host.

One thread multiplies, by weights that no cache holds, and the shortest time counts: so the result depends little on
what else the host does, and few rows are as bound by memory as in a model. Measured are `ROWS`; each stands for a range
of rows.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ringcore.host.cache_folder import our_cache_folder
from ringcore.host.measurements import Measurements, Seconds
from ringcore.host.resources import Host
from ringcore.model_executor.threads import one_thread

__all__ = ["ROWS", "Choice", "choose", "measured_seconds"]

ROWS = (1, 4, 16, 64)
_UP_TO = (2, 8, 32)  # the ranges of rows that the first ones stand for
_SMALLEST = 1 << 17  # numbers of a matrix whose products are worth measuring; less is mostly the call itself
_LARGEST = 1 << 22  # numbers of the matrix that is measured: of a larger one, so many outputs
_EVICTING = 1 << 23  # float32 numbers read between two products: 32 MiB
_REPEATS = 8
_HOPELESS = 2.0  # times the fastest after `_SURE` products: not measured further
_SURE = 3
_SECOND_COPY = 0.15  # the gain, relative and summed over ROWS, for which a matrix is packed in two ways

Multiply = Callable[[torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor, None], Multiply]  # of a weight [out, in] without a bias


@dataclass(frozen=True, slots=True)
class Choice:
    """Up to `max_few_rows` rows are multiplied by packing `few`, more by `many`; one packing for all where they are
    the same."""

    few: str
    many: str
    max_few_rows: int


def choose(seconds: Seconds, halved: str | None) -> Choice:
    """Of packings by name, with the seconds of each of ROWS.

    halved: the one of half the bytes: only this is worth a second copy beside a packing for many rows.
    """
    fastest = [min(each) for each in zip(*seconds.values(), strict=True)]
    relative = {name: [t / best for t, best in zip(times, fastest, strict=True)] for name, times in seconds.items()}
    costs = {Choice(name, name, 0): sum(times) for name, times in relative.items()}
    if halved in relative:
        for many, of_many in relative.items():
            for i, rows in enumerate(_UP_TO, 1):
                if many != halved:
                    costs[Choice(halved, many, rows)] = sum(relative[halved][:i]) + sum(of_many[i:]) + _SECOND_COPY
    return min(costs, key=costs.__getitem__)


def measured_seconds(
    num_outputs: int, num_inputs: int, packings: Mapping[str, Pack], folder: Path | None = None
) -> Seconds | None:
    """Of each packing, for ROWS. None for a matrix that is too small to measure, or where results cannot be kept.

    folder: where they are kept; None: the user's cache.
    """
    if num_outputs * num_inputs < _SMALLEST:
        return None
    num_outputs = min(num_outputs, max(64, _LARGEST // num_inputs))
    key = {
        "processor": _processor(),
        "torch": torch.__version__,
        "shape": f"{num_outputs} x {num_inputs}",
        "packings": " ".join(packings),
        "rows": " ".join(map(str, ROWS)),
    }
    measurements = Measurements(Path(our_cache_folder("products")) if folder is None else folder)
    return measurements.seconds(key, list(packings), len(ROWS), lambda: _measure(num_outputs, num_inputs, packings))


@functools.cache
def _processor() -> str:
    return Host().processor()


def _measure(num_outputs: int, num_inputs: int, packings: Mapping[str, Pack]) -> Seconds:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16().float()  # every packing can hold it
    evicting = torch.ones(_EVICTING)
    with one_thread():
        packed = {name: pack(weight, None) for name, pack in packings.items()}
        found: dict[str, list[float]] = {name: [] for name in packings}
        for rows in ROWS:
            x = torch.randn(rows, num_inputs, generator=generator)
            for name, seconds in _fastest(packed, x, evicting).items():
                found[name].append(seconds)
    return found


def _fastest(packed: Mapping[str, Multiply], x: torch.Tensor, evicting: torch.Tensor) -> dict[str, float]:
    """The shortest time of each, in turns."""
    times = dict.fromkeys(packed, math.inf)
    for multiply in packed.values():
        multiply(x)  # allocates, and generates code
    for repeat in range(_REPEATS):
        hopeless = _HOPELESS * min(times.values())
        for name, multiply in packed.items():
            if repeat < _SURE or times[name] < hopeless:
                evicting.sum()
                start = time.perf_counter()
                multiply(x)
                times[name] = min(times[name], time.perf_counter() - start)
    return times
