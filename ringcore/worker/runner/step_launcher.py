"""The launch stage: one step, from its scheduled rows to their sampled tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.distributed.pipeline import StageLink
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.protocol.steps import ModelRunnerOutput, NewRequest, RowError
from ringcore.tracing import Tracer
from ringcore.worker.drafts.proposer import Proposer
from ringcore.worker.logits.pooled_prompts import PooledPromptRows
from ringcore.worker.logits.prompt_logprobs import PromptLogprobRows
from ringcore.worker.logits.row_adjustments import AdjustmentOps, RowAdjustments
from ringcore.worker.logits.sampling_stage import SamplingStage
from ringcore.worker.logits.step_output import SampledRows, make_output
from ringcore.worker.rows.request_rows import AppendedBlocks, RequestRows
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["LaunchedStep", "LaunchedSteps", "StepLauncher", "StepStages"]


class LaunchedStep(Protocol):
    """One step that was launched, and may be in flight."""

    def done(self) -> bool:
        """Whether `read` would return or raise at once."""
        ...

    def read(self) -> None:
        """Waits for the step and adds its row errors to the message's. Idempotent. Raises RuntimeError where the device
        failed."""
        ...

    def sampled(self) -> SampledRows:
        """The samples of a step that was read, in the order of the message's rows."""
        ...


@dataclass(frozen=True, slots=True)
class StepStages:
    """What every launcher is composed of."""

    paged: PagedModel
    rows: RequestRows
    adjustments: RowAdjustments
    prompt_logprobs: PromptLogprobRows
    pooled_prompts: PooledPromptRows
    sampling: SamplingStage
    device: torch.device
    dtype: str  # the model's compute dtype
    tracer: Tracer
    link: StageLink | None  # to the other stages of a pipeline; None: there are none
    proposer: Proposer | None = None  # None: no row has drafts


class StepLauncher(ABC):
    """Launches steps on one kind of device."""

    adjustment_ops: ClassVar[AdjustmentOps]

    @abstractmethod
    def __init__(self, stages: StepStages, config: EngineConfig, plan: KVCacheConfig) -> None: ...

    @property
    @abstractmethod
    def max_unread_steps(self) -> int:
        """How many launched steps may be unread; the next one needs the oldest to be read first."""

    def follow(self) -> None:  # noqa: B027  most have nothing to follow
        """Called before a message is applied: tokens of earlier steps, from which drafts follow, go to the host's
        rows."""

    @abstractmethod
    def time_steps(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        """Runs dummy steps, on all ranks together, while there are no rows: the seconds of steps of so many tokens,
        each of which has logits, and by how many a step that drafts do not wait for is faster."""

    @abstractmethod
    def mirror(self, new_requests: Sequence[NewRequest], appended: Sequence[AppendedBlocks]) -> None:
        """Mirrors what the host's rows have just applied: admitted requests, and block table entries by KV cache
        group."""

    @abstractmethod
    def launch(
        self,
        scheduled: np.ndarray,
        counts: np.ndarray | None,
        errors: dict[int, RowError],
        max_gained: np.ndarray | None = None,
    ) -> LaunchedStep:
        """Launches a step of the next counts[i] tokens of row scheduled[i]; None: one each. A row samples if all its
        known tokens are computed then, and gains up to max_gained[i] tokens, drafts that the model accepts and one
        more; None: one each.

        errors: of the whole message, by row; added to now and when the step is read. A row with an error still
        advances: steps in flight may contain it.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Sets up before the first request what would delay it."""

    @property
    @abstractmethod
    def num_graphs_left(self) -> int:
        """CUDA graphs that are not captured yet."""

    @abstractmethod
    def capture_graph(self) -> None:
        """Captures one of the missing graphs. A no-op where there is none."""


class LaunchedSteps:
    """The `PendingOutput` of one message's steps."""

    def __init__(self, step: int, num_scheduled: int, is_output_rank: bool) -> None:
        self._step, self._num_scheduled, self._is_output_rank = step, num_scheduled, is_output_rank
        self.errors: dict[int, RowError] = {}
        self.launched: list[LaunchedStep] = []

    def done(self) -> bool:
        return not self.launched or self.launched[-1].done()

    def read(self, num_steps: int) -> None:
        """Waits for and reads the first `num_steps` steps; none if it is below 1."""
        for launched in self.launched[: max(0, num_steps)]:
            launched.read()

    def result(self) -> ModelRunnerOutput | None:
        """The output on the output rank, None on the others. Raises RuntimeError where the device failed."""
        self.read(len(self.launched))
        if not self._is_output_rank:
            return None
        steps = [launched.sampled() for launched in self.launched]
        return make_output(self._step, self._num_scheduled, steps, self.errors)
