"""Prompt logprobs: computed chunk by chunk in the steps of chunked prefill, buffered, and sent with the last chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.sampler import HostLogprobsCopy, LogprobTensors, logprob_tensors
from ringcore.protocol.requests import PromptLogprobs
from ringcore.protocol.steps import NewRequest
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["LaunchedPromptLogprobs", "PromptLogprobRows", "positions_at_once"]

_PIECE_BYTES = 64 << 20
_ENTRY_BYTES = 40  # a top-k entry: the output of topk and its concatenated copy


def positions_at_once(vocab_size: int, count: int) -> int:
    """Positions whose logprobs are computed at once, with `count` tokens each: up to 64 MiB, at least one position."""
    return max(1, _PIECE_BYTES // (4 * vocab_size + _ENTRY_BYTES * (1 + count)))


@dataclass(slots=True)
class _PendingPrompt:
    count: int  # top-k entries of each position
    num_prompt_tokens: int
    pieces: list[HostLogprobsCopy] = field(default_factory=list)  # in the order of the positions


@dataclass(frozen=True, slots=True)
class LaunchedPromptLogprobs:
    """The logprobs of one whole prompt, whose D2H copies are in flight."""

    row: int
    count: int
    pieces: Sequence[HostLogprobsCopy]

    def result(self) -> PromptLogprobs:
        """Waits for the D2H copies."""
        parts = [piece.arrays() for piece in self.pieces]
        ids, logprobs, ranks = (
            np.concatenate([part[index].reshape(-1) for part in parts] or [np.zeros(0)]) for index in range(3)
        )
        return PromptLogprobs(
            self.row, self.count, ids.astype(np.int32), logprobs.astype(np.float32), ranks.astype(np.int32)
        )


class PromptLogprobRows:
    """The rows that requested prompt logprobs and whose prompts are not complete."""

    def __init__(
        self,
        vocab_size: int,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        is_output_rank: bool,
        by_row: bool = False,
    ) -> None:
        """compute_logits: hidden states [n, hidden_size] -> [n, vocab_size], on all ranks together. by_row: see
        `logprob_tensors`."""
        self._by_row = by_row
        self._vocab_size, self._compute_logits, self._is_output_rank = vocab_size, compute_logits, is_output_rank
        self._pending: dict[int, _PendingPrompt] = {}

    def admit(self, request: NewRequest) -> None:
        count = request.sampling_params.prompt_logprobs
        if count is None or len(request.token_ids) > request.num_prompt_tokens:
            return  # a preempted request with generated tokens: its logprobs were sent with the first of them
        assert request.num_computed_tokens == 0, "prompt logprobs need every position of the prompt computed"
        count = self._vocab_size if count < 0 else min(count, self._vocab_size)
        self._pending[request.row] = _PendingPrompt(count, request.num_prompt_tokens)

    def clear(self, rows: np.ndarray) -> None:
        """Forgets rows [n]."""
        if self._pending:
            for row in rows.tolist():
                self._pending.pop(row, None)

    def take(self, hidden: torch.Tensor, batch: InputBatch, scheduled: np.ndarray, rows: RequestRows) -> None:
        """Launches the logprobs of the prompt tokens of a step, from its hidden states [num_tokens, hidden_size].

        scheduled: [n], the rows of `batch`, whose tokens are not counted as computed yet. Does not wait for the device.
        """
        if not self._pending:
            return
        for place, row in enumerate(scheduled.tolist()):
            pending = self._pending.get(row)
            if pending is None:
                continue
            # The hidden state at position p predicts the token at p + 1.
            first, past = batch.query_start_loc_cpu[place : place + 2].tolist()
            start = int(rows.num_computed_tokens[row])
            end = min(start + past - first, pending.num_prompt_tokens - 1)
            at_once = positions_at_once(self._vocab_size, pending.count)
            for begin in range(start, end, at_once):
                stop = min(begin + at_once, end)
                logits = self._compute_logits(hidden[first + begin - start : first + stop - start])
                if self._is_output_rank:
                    targets = upload(rows.token_ids[row, begin + 1 : stop + 1].astype(np.int64), logits.device)
                    pending.pieces.append(
                        HostLogprobsCopy(_narrow_logprobs(logits, targets, pending.count, self._by_row))
                    )

    def finished(self, scheduled: np.ndarray, rows: RequestRows) -> Sequence[LaunchedPromptLogprobs]:
        """Removes and returns those of rows [n] whose whole prompt is computed; none on ranks that return no output."""
        if not self._pending:
            return ()
        ends = rows.num_computed_tokens[scheduled].tolist()
        done = [row for row, end in zip(scheduled.tolist(), ends, strict=True) if self._is_done(row, end)]
        taken = [(row, self._pending.pop(row)) for row in done]
        if not self._is_output_rank:
            return ()
        return [LaunchedPromptLogprobs(row, pending.count, pending.pieces) for row, pending in taken]

    def _is_done(self, row: int, num_computed: int) -> bool:
        pending = self._pending.get(row)
        return pending is not None and num_computed >= pending.num_prompt_tokens


def _narrow_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int, by_row: bool) -> LogprobTensors:
    """In 32 bits: the host buffers them until the whole prompt is computed."""
    ids, logprobs, ranks = logprob_tensors(logits, token_ids, count, by_row)
    return LogprobTensors(ids.int(), logprobs, ranks.int())
