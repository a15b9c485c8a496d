"""Biases, penalties and token bitmasks on rows of logits, in plain torch: the CPU path, and the reference of the
kernel.

The order, on a row of float32:

    raw logits -> + bias -> repetition penalty -> - frequency_penalty * count - presence_penalty
               -> custom logits processors, called between two calls -> -inf where a bitmask masks the token
"""

from __future__ import annotations

import torch

from ringcore.kernels.logits.adjustment_inputs import IN_PROMPT, LogitAdjustments, reset_counts

__all__ = ["IN_PROMPT", "LogitAdjustments", "adjust_logits", "count_tokens", "reset_counts"]


def adjust_logits(
    logits: torch.Tensor,
    adjustments: LogitAdjustments,
    *,
    out: torch.Tensor | None = None,
    bias: bool = True,
    penalties: bool = True,
    masks: bool = True,
) -> torch.Tensor:
    """As `kernels.logit_adjustments.adjust_logits`, bit by bit; on a GPU this one synchronises with the device."""
    adjustments.check(*logits.shape)
    if out is None:
        out = logits.to(torch.float32, copy=True)
    elif out is not logits:
        out.copy_(logits)
    assert (out.shape, out.dtype) == (logits.shape, torch.float32), (out.shape, out.dtype, logits.shape)
    if bias:
        _add_biases(out, adjustments)
    if penalties:
        _penalize(out, adjustments)
    if masks:
        _apply_masks(out, adjustments)
    return out


def _add_biases(x: torch.Tensor, adjustments: LogitAdjustments) -> None:
    start, end = (places[: len(x)].long() for places in (adjustments.bias_start, adjustments.bias_end))
    lengths = end - start
    rows = torch.arange(len(x), device=x.device).repeat_interleave(lengths)
    # Of each (row, bias) pair: its distance from the row's first pair, which is that from the row's first bias.
    distance = torch.arange(len(rows), device=x.device) - (lengths.cumsum(0) - lengths)[rows]
    places = start[rows] + distance
    tokens = adjustments.bias_ids[places].long()
    x[rows, tokens] += adjustments.bias_values[places]  # (row, token) pairs are unique


def _penalize(x: torch.Tensor, adjustments: LogitAdjustments) -> None:
    slots = adjustments.counts_slot[: len(x)].long()
    counted = (slots >= 0).nonzero()[:, 0]
    counts = adjustments.counts[slots[counted]]
    which, tokens = counts.nonzero(as_tuple=True)  # sparse: a row has seen few tokens of the vocabulary
    rows = counted[which]
    times = (counts[which, tokens] & (IN_PROMPT - 1)).float()
    logits, repetition = x[rows, tokens], adjustments.repetition_penalty[rows]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    lowered = logits - adjustments.frequency_penalty[rows] * times - adjustments.presence_penalty[rows]
    x[rows, tokens] = torch.where(times > 0, lowered, logits)


def _apply_masks(x: torch.Tensor, adjustments: LogitAdjustments) -> None:
    slots = adjustments.mask_slot[: len(x)].long()
    masked = (slots >= 0).nonzero()[:, 0]
    words = adjustments.masks[slots[masked]]
    # By bytes, through a table of all 256: eight tokens each, the lowest bit first.
    bits = (torch.arange(256, device=x.device)[:, None] >> torch.arange(8, device=x.device)) & 1
    limits = torch.tensor([-torch.inf, torch.inf], dtype=x.dtype, device=x.device)[bits]
    limit = limits.index_select(0, words.view(torch.uint8).flatten().int()).view(len(words), 32 * words.shape[1])
    x[masked] = x[masked].minimum(limit[:, : x.shape[1]])  # NaN stays, so that a broken row is detected


def count_tokens(counts: torch.Tensor, counts_slot: torch.Tensor, token_ids: torch.Tensor) -> None:
    """As `kernels.logit_adjustments.count_tokens`; on a GPU this one synchronises with the device."""
    slots = counts_slot.long()
    counted = (slots >= 0).nonzero()[:, 0]
    counts[slots[counted], token_ids[counted]] += 1
