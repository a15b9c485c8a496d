"""What is recorded of every step, and who is told of them: a trace."""

from __future__ import annotations

from typing import Protocol

from ringcore.protocol.requests import OutputColumns

__all__ = ["StepObserver", "StepRecord"]

# A record of the tracer's chain `STEP`, which it can keep as it is: the number of the chain; when the step's scheduling
# began and ended, the workers had it, its output was taken and was applied, in seconds of the engine's clock; its
# number, its tokens, and the step that the message with its output names. Then its tokens sampled, its rows, and how
# many steps it is (multi-step). A plain tuple: a named one takes longer to make than all the rest.
StepRecord = tuple[int, float, float, float, float, float, int, int, int, int, int, int]


class StepObserver(Protocol):
    """A member of `StepsInFlight.observers`, for whom the records of steps alone are too little. Its methods must be
    fast, and must not raise. Steps that are lost with the workers are no steps."""

    def completed(self, record: StepRecord, columns: OutputColumns) -> None:
        """The output of the oldest step in flight was applied."""
        ...

    def sent(self, began_s: float, ended_s: float) -> None:
        """Outputs of a step were handed to the client, by the engine's clock."""
        ...
