"""Fault injection for `FakeExecutor`: deaths, errors, hangs and delays by step number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ringcore.errors import ConfigError

__all__ = ["Fault", "FaultKind", "check_faults"]

FaultKind = Literal["death", "error", "hang", "slow", "row_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault injected once, in the executor's step number `step`, counted from 0 across worker restarts.

    death: the worker is killed in the step; the step and every call fail with `EngineDeadError` until a restart.
    error: the step raises in the worker, which survives.
    hang: the step does not end; after the engine's step_timeout_s its workers are killed, like a death.
    slow: the step takes `seconds` longer.
    row_error: the request of `row` (None: of the step's first row) fails in the step; the other requests continue.
    """

    step: int
    kind: FaultKind
    seconds: float = 0.0
    row: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise _bad("kind", self.kind, f"give one of {', '.join(get_args(FaultKind))}")
        if self.step < 0:
            raise _bad("step", self.step, "steps are counted from 0")
        if not 0 <= self.seconds < math.inf:
            raise _bad("seconds", self.seconds, "give a number of seconds, 0 or more")


def check_faults(faults: Sequence[Fault], step_timeout_s: float | None) -> dict[int, Fault]:
    """The faults by step. Raises `ConfigError` for two in one step, and for a hang without a step_timeout_s."""
    by_step: dict[int, Fault] = {}
    for fault in faults:
        if fault.step in by_step:
            raise _bad("step", fault.step, "two faults are in one step; give each a step of its own")
        if fault.kind == "hang" and step_timeout_s is None:
            raise _bad("kind", fault.kind, "with step_timeout_s=None nothing ever ends it; give a step_timeout_s")
        by_step[fault.step] = fault
    return by_step


def _bad(field: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"fault: {field}={value!r}: {remedy}", option=f"fault.{field}", value=repr(value))
