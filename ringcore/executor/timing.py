"""The seconds of each phase of start-up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["add_parts", "timed"]


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Stores the seconds that the body takes under `name`."""
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def add_parts(phases: dict[str, float], name: str, reports: Iterable[object]) -> None:
    """Stores the parts of the phase `name` from the workers' reports: one mapping a rank, in which keys ending in "_s"
    are seconds. "weights_s" becomes "name.weights", of the slowest rank."""
    for of_rank in reports:
        if not isinstance(of_rank, Mapping):
            continue
        for key, seconds in of_rank.items():
            if key.endswith("_s"):
                part = f"{name}.{key.removesuffix('_s')}"
                phases[part] = max(phases.get(part, 0.0), float(seconds))
