"""The order of a step's rows in its batch: decoding rows first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["BatchOrder"]


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A row decodes if it has one uncomputed token, which the step computes, and nothing needs its hidden state."""

    scheduled: np.ndarray  # [n] int32: decoding rows first
    counts: np.ndarray | None  # [n] int32: tokens of each; None: one
    num_decodes: int
    inverse: np.ndarray | None  # [n]: the batch index of each row of the message; None: the same order

    @classmethod
    def of(
        cls, rows: RequestRows, scheduled: np.ndarray, counts: np.ndarray | None, is_prompt: np.ndarray | None = None
    ) -> BatchOrder:
        """Of a message's rows [n], before the step's tokens are counted as computed. is_prompt: [max_num_seqs] bool,
        rows that do not decode."""
        is_decode = rows.num_computed_tokens[scheduled] + 1 == rows.num_tokens[scheduled]
        if is_prompt is not None:
            is_decode &= ~is_prompt[scheduled]
        if counts is not None:
            is_decode &= counts == 1
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes in (0, len(scheduled)) or is_decode[:num_decodes].all():
            return cls(scheduled, counts, num_decodes, None)
        order = np.argsort(~is_decode, kind="stable")
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return cls(scheduled[order], None if counts is None else counts[order], num_decodes, inverse)

    def in_message_order(self, is_selected: np.ndarray) -> np.ndarray:
        """The batch indices of the rows that is_selected [n] selects, in the order of the message."""
        return np.flatnonzero(is_selected) if self.inverse is None else self.inverse[is_selected[self.inverse]]
