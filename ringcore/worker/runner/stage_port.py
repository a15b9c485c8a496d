"""What comes into a stage of a pipeline and leaves it, in a step: rows from one stage to the next, tokens from the last
to the first.

The last stage samples. The others append a token that they do not know (`UNKNOWN_TOKEN`); the first needs it when the
row is in a step again, and until then computes those of other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ringcore.distributed.pipeline import Arrival, StageLink
from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.models.base import CausalLM
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["StagePort", "WriteTokens", "make_port"]

# Writes tokens [n] into rows [n] at positions [n], of which they are the last ones.
WriteTokens = Callable[[np.ndarray, np.ndarray, torch.Tensor], None]


class StagePort:
    """Of the only stage: its inputs are ids, and its tokens its own."""

    def await_tokens(self, rows: np.ndarray) -> None:
        """Before a step of rows [n]: waits for their last tokens, and writes them."""

    def inputs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's inputs of a step with these ids [num_tokens]."""
        return input_ids

    def fill(self, inputs: torch.Tensor) -> None:
        """Receives the model's inputs of a step, unless they are ids: these are there."""

    def send_rows(self, rows: torch.Tensor) -> None:
        """To the next stage: the model's output [num_tokens, hidden_size], which may be overwritten afterwards."""

    def expect_tokens(self, rows: np.ndarray) -> None:
        """After a step in which rows [n] sample: the last stage will return their tokens, if this is the first."""

    def return_tokens(self, token_ids: torch.Tensor) -> None:
        """Sampled tokens [n], which may be overwritten afterwards, for the first stage's `expect_tokens`."""


def make_port(
    link: StageLink | None, model: CausalLM, rows: RequestRows, device: torch.device, write: WriteTokens
) -> StagePort:
    """link: None of the only stage."""
    return StagePort() if link is None else _PipelinePort(link, model, rows, device, write)


class _Expected(NamedTuple):
    rows: np.ndarray  # [n]
    positions: np.ndarray  # [n]
    admissions: np.ndarray  # [n]: identifies the row's request, see `RequestRows.num_admissions`
    token_ids: torch.Tensor  # [n] int64
    arrival: Arrival


class _PipelinePort(StagePort):
    """Invariant: `_expected` holds the tokens that were not taken yet, oldest first; `_newest` numbers, for each row,
    the last ones with a token of it."""

    def __init__(
        self, link: StageLink, model: CausalLM, rows: RequestRows, device: torch.device, write: WriteTokens
    ) -> None:
        self._link, self._model, self._rows, self._device, self._write = link, model, rows, device, write
        self._expected: deque[_Expected] = deque()
        self._num_expected = self._num_taken = 0
        self._newest = np.zeros(len(rows.num_tokens), dtype=np.int64)

    def await_tokens(self, rows: np.ndarray) -> None:
        newest = int(self._newest[rows].max()) if self._expected else 0
        while self._num_taken < newest:
            self._take_oldest()

    def _take_oldest(self) -> None:
        """Writes the tokens, but for rows that another request has by now."""
        rows, positions, admissions, token_ids, arrival = self._expected.popleft()
        self._num_taken += 1
        arrival.wait()
        is_current = self._rows.num_admissions[rows] == admissions
        if not is_current.all():
            rows, positions = rows[is_current], positions[is_current]
            token_ids = token_ids[upload(np.flatnonzero(is_current), token_ids.device)]
        if len(rows):
            self._write(rows, positions, token_ids)

    def inputs(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._link.stage.is_first:
            return input_ids
        received = self._model.new_inputs(len(input_ids), input_ids.device)
        self._link.receive_rows(received)
        return received

    def fill(self, inputs: torch.Tensor) -> None:
        if not self._link.stage.is_first:
            self._link.receive_rows(inputs)

    def send_rows(self, rows: torch.Tensor) -> None:
        self._link.send_rows(rows.clone())

    def expect_tokens(self, rows: np.ndarray) -> None:
        if not self._link.stage.is_first or not len(rows):
            return
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        arrival = self._link.receive_tokens(token_ids)
        positions, admissions = self._rows.num_tokens[rows] - 1, self._rows.num_admissions[rows]
        self._expected.append(_Expected(rows.copy(), positions, admissions, token_ids, arrival))
        self._num_expected += 1
        self._newest[rows] = self._num_expected
        # Of steps whose results the engine had before it sent this one, nothing is awaited any more.
        while len(self._expected) > self._link.stage.size + 1:
            self._take_oldest()

    def return_tokens(self, token_ids: torch.Tensor) -> None:
        self._link.send_tokens(token_ids.clone())
