"""Logit adjustments of rows (biases, penalties, token bitmasks), as columns and tables on the logits' device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload

__all__ = ["IN_PROMPT", "LogitAdjustments", "reset_counts"]

# The bit of a token's count that is set if the prompt contains it; the bits below count how often it was generated.
IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Of n rows, in the order of the logits' rows; the meaning of each number is in `SamplingParams`.

    Rows may share a slot or a range of biases: adjusting does not write to these tensors.
    """

    repetition_penalty: torch.Tensor  # [n] float32, above 0; 1 changes nothing
    frequency_penalty: torch.Tensor  # [n] float32
    presence_penalty: torch.Tensor  # [n] float32
    counts_slot: torch.Tensor  # [n] int32: the row's place in counts; -1: no penalties
    counts: torch.Tensor  # [slots, vocab_size] int32: how often each token was generated; `IN_PROMPT` is added
    bias_start: torch.Tensor  # [n] int32: row i's biases are bias_ids[start:end] and bias_values[start:end]
    bias_end: torch.Tensor  # [n] int32
    bias_ids: torch.Tensor  # [m] int32: ascending within a row, each once
    bias_values: torch.Tensor  # [m] float32
    mask_slot: torch.Tensor  # [n] int32: the row's place in masks; -1: every token may be sampled
    masks: torch.Tensor  # [slots, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set: t may be sampled

    def check(self, num_rows: int, vocab_size: int) -> None:
        """Checks shapes and dtypes; not the contents, which would synchronise with the device."""
        for rows in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty):
            assert (rows.dim(), rows.dtype) == (1, torch.float32), (rows.shape, rows.dtype)
            assert len(rows) >= num_rows, (len(rows), num_rows)
        for rows in (self.counts_slot, self.bias_start, self.bias_end, self.mask_slot):
            assert (rows.dim(), rows.dtype) == (1, torch.int32), (rows.shape, rows.dtype)
            assert len(rows) >= num_rows, (len(rows), num_rows)
        assert self.bias_ids.shape == self.bias_values.shape, (self.bias_ids.shape, self.bias_values.shape)
        assert (self.bias_ids.dtype, self.bias_values.dtype) == (torch.int32, torch.float32)
        for table, width in ((self.counts, vocab_size), (self.masks, -(-vocab_size // 32))):
            assert (table.dim(), table.dtype) == (2, torch.int32), (table.shape, table.dtype)
            assert table.shape[1] == width, (table.shape, width)
            assert table.is_contiguous(), "tables must be contiguous"


def reset_counts(counts: torch.Tensor, slot: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
    """Recomputes counts[slot] from a row's own tokens: its prompt and what was generated so far, int32 on the host.

    counts: [slots, vocab_size] int32. Does not synchronise with the device.
    """
    row = counts[slot].zero_()
    num_prompt = len(prompt_ids)
    ids = np.concatenate((prompt_ids, output_ids)).astype(np.int32, copy=False)
    if not len(ids):
        return
    assert ids.min() >= 0, (slot, int(ids.min()))
    assert ids.max() < len(row), (slot, int(ids.max()), len(row))
    placed = upload(ids, counts.device).long()
    row.index_fill_(0, placed[:num_prompt], IN_PROMPT)
    generated = placed[num_prompt:]
    row.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
