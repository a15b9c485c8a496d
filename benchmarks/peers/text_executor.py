"""Executors for ringcore whose workers cost nothing and say a text: for what becomes of tokens behind the engine.

In a module of its own, for the engine's process finds it by name.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.peers.ringcore_null_executor import NullWorker
from ringcore.config import EngineConfig
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.testing import FakeExecutor

__all__ = ["PACED_STEP_S", "TEXT_FILE", "FlatOutExecutor", "PacedExecutor"]

TEXT_FILE = "text_tokens.json"  # in the model's folder: the ids of the text
PACED_STEP_S = 0.025
_ROW_STRIDE = 97  # rows say the same text from other places on


class FlatOutExecutor(FakeExecutor):
    """Tokens as fast as the engine asks for them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, worker_factory="benchmarks.peers.text_executor:TextWorker")


class PacedExecutor(FakeExecutor):
    """Steps that take their time, in which the process sleeps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, worker_factory="benchmarks.peers.text_executor:PacedWorker")


class TextWorker(NullWorker):
    step_s: ClassVar[float] = 0.0

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None:
        super().__init__(config, rank, rendezvous)
        self._text = np.array(json.loads(Path(config.model.model, TEXT_FILE).read_text()), np.int32)
        self._due_s = 0.0

    def execute(self, step: SchedulerOutput, failing_row: int | None = None) -> ModelRunnerOutput:
        now = time.monotonic()
        time.sleep(max(0.0, self._due_s - now))
        self._due_s = max(self._due_s, now) + self.step_s * step.num_steps
        return super().execute(step, failing_row)

    def next_tokens(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        places = self._known[rows] + _ROW_STRIDE * rows
        text: np.ndarray = self._text[(places[:, None] + np.arange(num_steps)).ravel() % len(self._text)]
        return text


class PacedWorker(TextWorker):
    step_s = PACED_STEP_S
