"""What is recorded of every step, and who is told of them: a trace."""

from __future__ import annotations

from typing import Protocol

from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import SchedulerOutput

__all__ = ["Stamps", "StepObserver"]

# When its scheduling began and ended, the workers had it, its output was taken and was applied, in seconds of the
# engine's clock; the tokens scheduled and sampled since the start, its own included; its rows; how many steps it is
# (multi-step). A plain tuple: a named one takes longer to make than all the rest.
Stamps = tuple[float, float, float, float, float, int, int, int, int]


class StepObserver(Protocol):
    """A member of `StepsInFlight.observers`, for what the record of a step (`Stamps`) does not say. Its methods must be
    fast, and must not raise. Steps that are lost with the workers are no steps."""

    def completed(self, step: SchedulerOutput, stamps: Stamps, columns: OutputColumns) -> None:
        """The output of the oldest step in flight was applied."""
        ...

    def sent(self, began_s: float, ended_s: float) -> None:
        """Outputs of a step were handed to the client, by the engine's clock."""
        ...
