"""One step's inputs, gathered from the rows without a loop over tokens or sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.worker.request_rows import RequestRows

__all__ = ["InputBatch"]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of a step, row after row, and the places where it samples."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    rows: np.ndarray  # [num_seqs] int32
    sample_rows: np.ndarray  # [num_sampled] int32: those of `rows` whose known tokens are all computed after the step
    sample_tokens: torch.Tensor | None  # [num_sampled] int64: their last tokens in the step; None: all tokens, in order

    @classmethod
    def gather(cls, rows: RequestRows, scheduled: np.ndarray, num_scheduled_tokens: np.ndarray) -> InputBatch:
        """The next num_scheduled_tokens[i] >= 1 tokens of row scheduled[i]."""
        starts = rows.num_computed_tokens[scheduled]
        seq_lens = starts + num_scheduled_tokens
        assert (seq_lens <= rows.num_tokens[scheduled]).all(), "a step has tokens that its row does not"
        assert (seq_lens <= rows.num_blocks[scheduled] * rows.block_size).all(), "a step has tokens without a block"
        ends = np.cumsum(num_scheduled_tokens)
        num_tokens = int(ends[-1])
        query_start_loc = np.concatenate(([0], ends)).astype(np.int32)
        token_rows = np.repeat(scheduled, num_scheduled_tokens)
        # Token t of the step is the (t - first token of its row)-th from the row's start.
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], num_scheduled_tokens)
        offsets = positions % rows.block_size
        slots = rows.block_table[token_rows, positions // rows.block_size] * np.int64(rows.block_size) + offsets
        sampling = seq_lens == rows.num_tokens[scheduled]
        last_tokens = ends[sampling].astype(np.int64) - 1
        max_seq_len = int(seq_lens.max())
        return cls(
            input_ids=torch.from_numpy(rows.token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            metadata=AttentionMetadata(
                num_tokens=num_tokens,
                num_seqs=len(scheduled),
                max_query_len=int(num_scheduled_tokens.max()),
                max_seq_len=max_seq_len,
                query_start_loc_cpu=query_start_loc,
                seq_lens_cpu=seq_lens.astype(np.int32),
                block_table_cpu=rows.block_table[scheduled, : -(-max_seq_len // rows.block_size)],
                slot_mapping=torch.from_numpy(slots),
            ),
            rows=scheduled,
            sample_rows=scheduled[sampling],
            sample_tokens=None if len(last_tokens) == num_tokens else torch.from_numpy(last_tokens),
        )
