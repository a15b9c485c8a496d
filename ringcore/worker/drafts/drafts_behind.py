"""Drafts that a device computes behind a step, before the host has read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

__all__ = ["DraftsBehind", "VerifiedPlaces"]


class VerifiedPlaces(NamedTuple):
    """What a decode step with drafts leaves of its places on the device: the same tensors of every step, written by the
    next one."""

    batch: torch.Tensor  # [num_places] int32: negative where there is no place
    token_ids: torch.Tensor  # [num_places] int64: sampled after each, as if the drafts before it were right
    gained: torch.Tensor  # [num_places] int32: 1 where the row gained that token
    positions: torch.Tensor  # [num_places] int64
    seq_lens: torch.Tensor  # [num_places] int32; 0 is padding, or of a row that had stopped
    slots: tuple[torch.Tensor, ...]  # by KV cache group: [num_places] int64
    block_tables: tuple[torch.Tensor, ...]  # by group: [num_places, width] int32, as far as seq_lens reach
    row_tables: tuple[torch.Tensor, ...]  # by group: [max_rows, width] int32, stale behind a row's blocks


class DraftsBehind:
    """Drafts of some rows, after the last token that each gained in a step. They are on their way to the host."""

    def __init__(self, rows: np.ndarray, limits: np.ndarray, token_ids: torch.Tensor) -> None:
        """rows: [n], distinct; limits: [n], before which each had room in its blocks; token_ids: [num_drafts, n] int64,
        on the device."""
        self._order, self._limits = np.argsort(rows), limits
        self._rows, self._num_drafts = rows[self._order], len(token_ids)
        self._on_host, self._copied = token_ids, None
        if token_ids.is_cuda:
            self._on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._on_host.copy_(token_ids, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def num_drafts(self, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[n], at least 1 each: of rows [n], the last token of which is at starts [n]. A draft follows from those
        before it in the row's blocks, so there are fewer where these end."""
        num_there = self._limits[self._places(rows)] - starts + 1
        limited: np.ndarray = np.clip(num_there, 1, self._num_drafts)
        return limited

    def token_ids(self, rows: np.ndarray) -> np.ndarray:
        """[n, num_drafts] int32, of which as many of each row count. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids: np.ndarray = self._on_host.numpy()[:, self._places(rows)].T.astype(np.int32)
        return token_ids

    def _places(self, rows: np.ndarray) -> np.ndarray:
        places: np.ndarray = self._order[np.searchsorted(self._rows, rows)]
        return places
