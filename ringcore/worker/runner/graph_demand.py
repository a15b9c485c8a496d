"""Which missing CUDA graphs are captured by steps: those of an engine that is never idle for long."""

from __future__ import annotations

from collections import Counter

__all__ = ["GraphDemand"]

_MISSES = 16  # steps of a size that pay for its capture
_STEPS_APART = 128  # without their graph, from one capture to the next: fewer than 1% of the steps wait for one


class GraphDemand:
    """A step whose graph is missing is launched operation by operation. An idle engine captures what is missing
    (`engine_core.idle_work`); a busy one what is missed often, seldom. All ranks have the same steps, and so decide
    alike."""

    def __init__(self) -> None:
        self._misses: Counter[int] = Counter()
        self._num_since = _STEPS_APART  # since the last capture by a step

    def is_due(self, size: int) -> bool:
        """Whether a step of this size, whose graph is missing, captures it; to be asked once a step."""
        self._misses[size] += 1
        self._num_since += 1
        if self._misses[size] < _MISSES or self._num_since < _STEPS_APART:
            return False
        self._num_since = 0
        return True
