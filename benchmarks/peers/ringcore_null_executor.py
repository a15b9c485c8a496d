"""An executor for ringcore that costs next to nothing: every row whose tokens are all computed gets a token at once.

In a module of its own, for the engine's process finds it by name.
"""

from __future__ import annotations

import numpy as np

from ringcore.config import EngineConfig
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.testing import HARDWARE, FakeExecutor, FakeWorker

__all__ = ["NullExecutor", "NullWorker"]

TOKEN_ID = 7


class NullExecutor(FakeExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, worker_factory="benchmarks.peers.ringcore_null_executor:NullWorker")


class NullWorker(FakeWorker):
    """A fake worker that checks nothing, and keeps of each row how many tokens it knows and has computed."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None:
        super().__init__(config, rank, HARDWARE["h200"])
        self._known, self._computed = np.zeros((2, config.scheduler.max_num_seqs), np.int64)
        self._last = int_array()

    def execute(self, step: SchedulerOutput, failing_row: int | None = None) -> ModelRunnerOutput:
        for new in step.new_requests:
            self._known[new.row], self._computed[new.row] = len(new.token_ids), new.num_computed_tokens
        rows = self._last if step.rows is None else step.rows
        self._last = rows
        self._computed[rows] += 1 if step.num_scheduled_tokens is None else step.num_scheduled_tokens
        samples = self._computed[rows] == self._known[rows]
        all_sample = bool(samples.all())
        sampled = rows if all_sample else rows[samples]
        token_ids = self.next_tokens(sampled, step.num_steps)
        self._known[sampled] += step.num_steps
        self._computed[sampled] += step.num_steps - 1
        return ModelRunnerOutput(step.step, None if all_sample else sampled, token_ids)

    def next_tokens(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        """Of each row the tokens of all steps, one row after the other."""
        return np.full(len(rows) * num_steps, TOKEN_ID, np.int32)
