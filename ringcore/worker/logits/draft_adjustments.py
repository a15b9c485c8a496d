"""Logit adjustments of rows with drafts that the device verifies: each token is adjusted as if those before it were
known, since it counts only if they are the drafts.

Of what adjusts a row on the device only the counts of its tokens change with each of them. So logits are adjusted turn
by turn, and in between the drafts are counted; what the row did not gain is taken back at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import RowError
from ringcore.worker.logits.row_adjustments import RowAdjustments
from ringcore.worker.rows.drafts import Drafts

__all__ = ["DraftPlaces", "adjust_drafts", "count_drafts"]


class DraftPlaces:
    """The places of a step: of each row its last token, then its drafts."""

    def __init__(self, rows: np.ndarray, drafts: Drafts) -> None:
        """rows: [n] int32."""
        spans = RowSpans(1, 1 + drafts.counts)
        self.rows = spans.repeat(rows)  # [num_places] int32
        self.offsets = spans.offsets(len(rows))  # [num_places] int64
        self.token_ids = np.zeros(len(self.rows), dtype=np.int64)  # [num_places]: drafts; 0 where the offset is
        self.token_ids[self.offsets > 0] = drafts.token_ids


def adjust_drafts(
    adjustments: RowAdjustments,
    logits: torch.Tensor,
    places: DraftPlaces,
    generated: Callable[[int], np.ndarray],
    errors: dict[int, RowError],
) -> torch.Tensor:
    """`RowAdjustments.adjust` of logits [num_places, vocab_size]. The drafts of rows that have counts are counted."""
    is_draft = places.offsets > 0
    if not adjustments.has_counts(places.rows[is_draft]).any():
        return adjustments.adjust(logits, places.rows, generated, errors)
    adjusted = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for turn in range(int(places.offsets.max()) + 1):
        here = np.flatnonzero(places.offsets == turn)
        rows, at = places.rows[here], upload(here, logits.device)
        if turn:
            adjustments.count(rows, upload(places.token_ids[here], logits.device))
        adjusted.index_copy_(0, at, adjustments.adjust(logits[at], rows, generated, errors))
    return adjusted


def count_drafts(
    adjustments: RowAdjustments, places: DraftPlaces, token_ids: torch.Tensor, gained: torch.Tensor
) -> None:
    """After `adjust_drafts`: counts the tokens that were gained, and no draft. token_ids: [num_places] int64, sampled
    after each place; gained: [num_places] int32, 1 where the row gained the token. Both on the device."""
    counted = np.flatnonzero(adjustments.has_counts(places.rows))
    if not len(counted):
        return
    at = upload(counted, token_ids.device)
    adjustments.add_counts(places.rows[counted], token_ids[at], gained[at])
    drafted = counted[places.offsets[counted] > 0]
    if len(drafted):
        draft_ids = upload(places.token_ids[drafted], token_ids.device)
        adjustments.add_counts(places.rows[drafted], draft_ids, gained.new_full((len(drafted),), -1))
