"""Pooled prompts: hidden states taken chunk by chunk in the steps of chunked prefill, and sent with the last chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringcore.params.sampling_params import Pooling
from ringcore.protocol.requests import PooledPrompt
from ringcore.protocol.steps import NewRequest
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["LaunchedPooledPrompt", "PooledPromptRows"]


@dataclass(slots=True)
class _PendingPrompt:
    pooling: Pooling
    num_prompt_tokens: int
    pooled: torch.Tensor | None = None  # [hidden_size] float32: the sum so far, or the last token's state


class LaunchedPooledPrompt:
    """One pooled prompt, whose D2H copy is in flight."""

    def __init__(self, row: int, pooled: torch.Tensor) -> None:
        self.row = row
        self._copied: torch.cuda.Event | None = None
        self._on_host = pooled
        if pooled.is_cuda:
            self._on_host = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True)
            self._on_host.copy_(pooled, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> PooledPrompt:
        """Waits for the D2H copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return PooledPrompt(self.row, self._on_host.numpy())


class PooledPromptRows:
    """The rows that asked for a pooled prompt, and whose prompts are not complete.

    Such a row is computed as a prompt, also where one token is left of it, since only steps of prompts have hidden
    states to take.
    """

    def __init__(self, max_num_seqs: int, is_output_rank: bool) -> None:
        self._is_output_rank = is_output_rank
        self._pending: dict[int, _PendingPrompt] = {}
        self._is_pending = np.zeros(max_num_seqs, dtype=bool)

    @property
    def is_pending(self) -> np.ndarray | None:
        """[max_num_seqs] bool; None if there are none."""
        return self._is_pending if self._pending else None

    def admit(self, request: NewRequest) -> None:
        pooling = request.sampling_params.pooling
        if pooling is None or len(request.token_ids) > request.num_prompt_tokens:
            return  # a preempted request with generated tokens: its pooled prompt was sent with the first of them
        is_whole = pooling == "last" or request.num_computed_tokens == 0
        assert is_whole, "the mean needs every position of the prompt computed"
        self._pending[request.row] = _PendingPrompt(pooling, request.num_prompt_tokens)
        self._is_pending[request.row] = True

    def clear(self, rows: np.ndarray) -> None:
        """Forgets rows [n]."""
        if self._pending:
            self._is_pending[rows] = False
            for row in rows.tolist():
                self._pending.pop(row, None)

    def take(self, hidden: torch.Tensor, batch: InputBatch, scheduled: np.ndarray, rows: RequestRows) -> None:
        """Pools the prompt tokens of a step, from its hidden states [num_tokens, hidden_size].

        scheduled: [n], the rows of `batch`, whose tokens are not counted as computed yet. Does not wait for the device.
        """
        if not self._pending or not self._is_output_rank:
            return
        for place, row in enumerate(scheduled.tolist()):
            pending = self._pending.get(row)
            if pending is None:
                continue
            first, past = batch.query_start_loc_cpu[place : place + 2].tolist()
            if pending.pooling == "mean":
                taken = hidden[first:past].sum(0, dtype=torch.float32)
                pending.pooled = taken if pending.pooled is None else pending.pooled + taken
            elif int(rows.num_computed_tokens[row]) + past - first >= pending.num_prompt_tokens:
                pending.pooled = hidden[past - 1].to(torch.float32, copy=True)

    def finished(self, scheduled: np.ndarray, rows: RequestRows) -> Sequence[LaunchedPooledPrompt]:
        """Removes and returns those of rows [n] whose whole prompt is computed; none on ranks that return no output."""
        if not self._pending:
            return ()
        ends = rows.num_computed_tokens[scheduled].tolist()
        done = [row for row, end in zip(scheduled.tolist(), ends, strict=True) if self._is_done(row, end)]
        self._is_pending[done] = False
        taken = [(row, self._pending.pop(row)) for row in done]
        return [
            LaunchedPooledPrompt(row, one.pooled / one.num_prompt_tokens if one.pooling == "mean" else one.pooled)
            for row, one in taken
            if one.pooled is not None
        ]

    def _is_done(self, row: int, num_computed: int) -> bool:
        pending = self._pending.get(row)
        return pending is not None and num_computed >= pending.num_prompt_tokens
