"""One step's model inputs, gathered from the persistent batch without a Python loop over tokens or sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.launch.upload import upload
from ringcore.protocol.row_spans import RowSpans
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["InputBatch"]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of a step, packed row after row (varlen), and the indices where it samples."""

    input_ids: torch.Tensor  # [num_tokens] int64; 0 where only the device has the token
    positions: torch.Tensor  # [num_tokens] int64
    metadata: tuple[AttentionMetadata, ...]  # by KV cache group: they differ in block table and slot mapping
    sample_rows: np.ndarray  # [num_sampled] int32: rows whose known tokens are all computed after the step
    # [num_positions] int64: indices of their last tokens, each followed by those of its drafts; None: all, in order
    sample_tokens: torch.Tensor | None
    sample_drafts: np.ndarray | None = None  # [num_sampled] int64: drafts of each; None: none

    def sampled_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size] -> [num_positions, hidden_size], of the tokens after which rows sample."""
        return hidden if self.sample_tokens is None else hidden[self.sample_tokens]

    @property
    def query_start_loc_cpu(self) -> np.ndarray:
        """[num_seqs + 1] int32, as in the metadata of every group."""
        return self.metadata[0].query_start_loc_cpu

    @classmethod
    def gather(
        cls,
        rows: RequestRows,
        scheduled: np.ndarray,
        num_scheduled_tokens: np.ndarray | None,
        device: torch.device,
        *,
        starts: np.ndarray | None = None,
        num_decodes: int = 0,
        drafts: np.ndarray | None = None,
    ) -> InputBatch:
        """The next num_scheduled_tokens[i] >= 1 tokens of row scheduled[i], on `device`; None: one each.

        drafts: [n] int64, how many of them are drafts after its last known token; None: none.

        starts: [n] int64, the position of each row's first token, by default its first uncomputed one. num_decodes: see
        `AttentionMetadata`.
        """
        if starts is None:
            starts = rows.num_computed_tokens[scheduled]
        if num_scheduled_tokens is None:
            query_start_loc = np.arange(len(scheduled) + 1, dtype=np.int32)
            token_rows, positions, seq_lens, max_query_len = scheduled, starts, starts + 1, 1
        else:
            query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int32)
            np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
            token_rows = np.repeat(scheduled, num_scheduled_tokens)
            # Token t of the step is the (t - first token of its row)-th from the row's start.
            positions = np.arange(len(token_rows)) + np.repeat(starts - query_start_loc[:-1], num_scheduled_tokens)
            seq_lens, max_query_len = starts + num_scheduled_tokens, int(num_scheduled_tokens.max())
        num_known = seq_lens if drafts is None else seq_lens - drafts
        assert (num_known <= rows.num_tokens[scheduled]).all(), "a step has tokens that its row does not"
        sampling = num_known == rows.num_tokens[scheduled]
        sample_tokens = query_start_loc[1:][sampling].astype(np.int64) - 1
        sample_drafts = None if drafts is None else drafts[sampling]
        if sample_drafts is not None:
            spans = RowSpans(1, 1 + sample_drafts)
            sample_tokens = spans.repeat(sample_tokens - sample_drafts) + spans.offsets(len(sample_drafts))
        lens = query_start_loc, seq_lens, max_query_len
        return cls(
            input_ids=upload(np.maximum(rows.token_ids[token_rows, positions], 0).astype(np.int64), device),
            positions=upload(positions, device),
            metadata=_metadata(rows, scheduled, *lens, token_rows, positions, num_decodes, device),
            sample_rows=scheduled[sampling],
            sample_tokens=None if len(sample_tokens) == len(token_rows) else upload(sample_tokens, device),
            sample_drafts=sample_drafts,
        )


def _metadata(
    rows: RequestRows,
    scheduled: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    max_query_len: int,
    token_rows: np.ndarray,
    positions: np.ndarray,
    num_decodes: int,
    device: torch.device,
) -> tuple[AttentionMetadata, ...]:
    max_seq_len, seq_lens_cpu = int(seq_lens.max()), seq_lens.astype(np.int32)
    is_cached: np.ndarray | None = None
    if (rows.num_computed_tokens[scheduled] < rows.num_cached_tokens[scheduled]).any():
        is_cached = positions < rows.num_cached_tokens[token_rows]
    found = []
    for table in rows.block_tables:
        assert (seq_lens <= table.num_blocks[scheduled] * table.block_size).all(), "a step has tokens without a block"
        found.append(
            AttentionMetadata(
                num_tokens=len(token_rows),
                num_seqs=len(scheduled),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_start_loc_cpu=query_start_loc,
                seq_lens_cpu=seq_lens_cpu,
                block_table_cpu=table.block_ids[scheduled, : -(-max_seq_len // table.block_size)],
                slot_mapping=upload(table.slots(token_rows, positions, is_cached), device),
                num_decodes=num_decodes,
            )
        )
    return tuple(found)
