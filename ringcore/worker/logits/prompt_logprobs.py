"""Log-probabilities of prompts: taken from the steps that compute them, kept until the last one, then sent at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ringcore.model_executor.sampler import HostLogprobsCopy, LogprobTensors, logprob_tensors
from ringcore.protocol.requests import PromptLogprobs
from ringcore.protocol.steps import NewRequest
from ringcore.worker.rows.upload import upload

__all__ = ["LaunchedPromptLogprobs", "PromptLogprobRows", "positions_at_once"]

_PIECE_BYTES = 64 << 20
_ENTRY_BYTES = 40  # of one of the most likely tokens: as it is found, and as it is put beside others


def positions_at_once(vocab_size: int, count: int) -> int:
    """Positions whose log-probabilities are computed together, with `count` tokens each: 64 MiB of them, or one."""
    return max(1, _PIECE_BYTES // (4 * vocab_size + _ENTRY_BYTES * (1 + count)))


@dataclass(slots=True)
class _Asked:
    count: int  # the most likely tokens of each position
    num_prompt_tokens: int
    pieces: list[HostLogprobsCopy] = field(default_factory=list)  # in the order of the positions


@dataclass(frozen=True, slots=True)
class LaunchedPromptLogprobs:
    """Of one whole prompt, on their way to the host."""

    row: int
    count: int
    pieces: Sequence[HostLogprobsCopy]

    def result(self) -> PromptLogprobs:
        """Waits for the device."""
        parts = [piece.arrays() for piece in self.pieces]
        ids, logprobs, ranks = (
            np.concatenate([part[index].reshape(-1) for part in parts] or [np.zeros(0)]) for index in range(3)
        )
        return PromptLogprobs(
            self.row, self.count, ids.astype(np.int32), logprobs.astype(np.float32), ranks.astype(np.int32)
        )


class PromptLogprobRows:
    """The rows whose prompts' log-probabilities are asked for and not complete."""

    def __init__(self, vocab_size: int, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """compute_logits: hidden states [n, hidden_size] -> [n, vocab_size], on all ranks together."""
        self._vocab_size, self._compute_logits = vocab_size, compute_logits
        self._asked: dict[int, _Asked] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def admit(self, request: NewRequest) -> None:
        count = request.sampling_params.prompt_logprobs
        if count is None or len(request.token_ids) > request.num_prompt_tokens:
            return  # one with tokens of its own had them with the first of these
        assert request.num_computed_tokens == 0, "every position of the prompt is needed"
        count = self._vocab_size if count < 0 else min(count, self._vocab_size)
        self._asked[request.row] = _Asked(count, request.num_prompt_tokens)

    def clear(self, rows: np.ndarray) -> None:
        """Forgets rows [n]."""
        if self._asked:
            for row in rows.tolist():
                self._asked.pop(row, None)

    def take(
        self,
        hidden: torch.Tensor,
        rows: np.ndarray,
        starts: np.ndarray,
        query_start_loc: np.ndarray,
        token_ids: np.ndarray,
        is_output: bool,
    ) -> None:
        """The prompts' part in a step: hidden [num_tokens, hidden_size], row after row as in `InputBatch`.

        rows: [n]. starts: [n], the position of each one's first token in the step. token_ids: [max_rows, max_len], the
        rows' tokens. is_output: whether this rank has to have the result. Does not wait for the device.
        """
        for place, row in enumerate(rows.tolist()):
            asked = self._asked.get(row)
            if asked is None:
                continue
            # The hidden state at position p tells of the token at p + 1.
            first, start = int(query_start_loc[place]), int(starts[place])
            end = min(start + int(query_start_loc[place + 1]) - first, asked.num_prompt_tokens - 1)
            at_once = positions_at_once(self._vocab_size, asked.count)
            for begin in range(start, end, at_once):
                past = min(begin + at_once, end)
                logits = self._compute_logits(hidden[first + begin - start : first + past - start])
                if is_output:
                    told = upload(token_ids[row, begin + 1 : past + 1].astype(np.int64), logits.device)
                    asked.pieces.append(HostLogprobsCopy(_found(logits, told, asked.count)))

    def finished(self, rows: np.ndarray, ends: np.ndarray, is_output: bool) -> list[LaunchedPromptLogprobs]:
        """Of those of rows [n] that have computed ends [n] tokens, their whole prompts; they are asked for no more."""
        done = [row for row, end in zip(rows.tolist(), ends.tolist(), strict=True) if self._is_done(row, end)]
        taken = [(row, self._asked.pop(row)) for row in done]
        return [LaunchedPromptLogprobs(row, asked.count, asked.pieces) for row, asked in taken if is_output]

    def _is_done(self, row: int, num_computed: int) -> bool:
        asked = self._asked.get(row)
        return asked is not None and num_computed >= asked.num_prompt_tokens


def _found(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobTensors:
    """Narrow: the host keeps them until the prompt is through."""
    ids, logprobs, ranks = logprob_tensors(logits, token_ids, count)
    return LogprobTensors(ids.int(), logprobs, ranks.int())
