"""Starts of ringcore that adopt a parked engine, beside those of a new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import LOAD_TIMEOUT_S, EngineSpec, note

__all__ = ["parked", "parked_spec"]


def parked_spec(spec: EngineSpec, name: str, **settings: Any) -> EngineSpec:
    """The same engine, which is to be adopted: a start fails where none is parked."""
    return replace(spec, name=name, settings={**spec.settings, **settings, "start_from": "parked_only"})


@contextmanager
def parked(spec: EngineSpec, model: Path) -> Iterator[None]:
    """Within the block, and from its begin on, an engine of this spec is parked, if the spec is to be adopted."""
    if "start_from" not in spec.settings:
        yield
        return
    keeper = replace(spec, command=(spec.python, "-m", "benchmarks.peers.parked_ringcore"))
    note(f"{spec.name}: parking")
    with keeper.start() as driver:
        driver.call("park", LOAD_TIMEOUT_S, model=str(model), settings=dict(spec.settings))
        yield
