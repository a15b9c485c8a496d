"""The seconds of each phase of start-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["timed"]


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Enters the seconds that the body takes under `name`."""
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started
