"""Executors whose steps take their time, and no processor."""

from __future__ import annotations

from ringcore.config import EngineConfig
from ringcore.testing import FakeExecutor, StepCost

__all__ = ["PacedExecutor", "SlowlyPacedExecutor"]


class PacedExecutor(FakeExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, cost=StepCost(base_s=0.01))


class SlowlyPacedExecutor(FakeExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, cost=StepCost(base_s=0.05))
