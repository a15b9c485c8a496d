"""Timing of the start-up phases, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["add_parts", "timed"]


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Records the duration of the body as `phases[name]`."""
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def add_parts(phases: dict[str, float], name: str, reported: Iterable[object]) -> None:
    """Records the sub-phases of phase `name` from the workers' reports: one mapping a rank, in which keys that end in
    "_s" are seconds. "weights_s" becomes "name.weights", the maximum over the ranks."""
    for of_rank in reported:
        if not isinstance(of_rank, Mapping):
            continue
        for key, seconds in of_rank.items():
            if key.endswith("_s"):
                part = f"{name}.{key.removesuffix('_s')}"
                phases[part] = max(phases.get(part, 0.0), float(seconds))
