"""Executors of jobs: fake ones that take their time, so that something is in flight when a job is killed."""

from __future__ import annotations

from ringcore.testing import FakeExecutor, StepCost


class Paced(FakeExecutor):
    """A step takes 2 ms."""

    def __init__(self, config) -> None:
        super().__init__(config, cost=StepCost(base_s=0.002))


class Unhurried(FakeExecutor):
    """A step takes 20 ms."""

    def __init__(self, config) -> None:
        super().__init__(config, cost=StepCost(base_s=0.02))


class Slow(FakeExecutor):
    """A step takes a minute."""

    def __init__(self, config) -> None:
        super().__init__(config, cost=StepCost(base_s=60.0))
