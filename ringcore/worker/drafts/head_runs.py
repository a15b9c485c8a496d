"""Runs of a head over its KV cache: the tokens that the model has, then its own."""

from __future__ import annotations

import numpy as np
import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.worker.drafts.drafts_behind import DraftsBehind, VerifiedPlaces
from ringcore.worker.drafts.head_features import Due
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["MOST_AT_ONCE", "HeadRuns"]

MOST_AT_ONCE = 2048  # tokens of a run


class HeadRuns:
    """A run writes keys and values to the row's blocks, at the positions of the model's own: of tokens that turn out
    wrong they are written again."""

    def __init__(
        self, head: DraftHead, backend: PagedBackend, kv_cache: torch.Tensor, rows: RequestRows, group: int
    ) -> None:
        """backend, kv_cache: of its attention layer, which is in this KV cache group."""
        self.head, self._backend, self._rows, self._table = head, backend, rows, rows.block_tables[group]
        self._group = group
        self._device, index = head.tapped.device, head.attention.index
        self._layer = {index: 0}, {index: kv_cache}
        # The residual stream after the last position of each row that was computed; the last one is padding's.
        self._streams = torch.zeros(len(rows.num_tokens) + 1, head.hidden_size, device=self._device)

    def verified_in(self, places: VerifiedPlaces) -> None:
        """Called once, where a device verifies drafts."""

    def compute(self, due: Due) -> None:
        """The tokens of the model's steps."""
        firsts = np.cumsum(due.counts) - due.counts
        for begin in range(0, len(due.tapped), MOST_AT_ONCE):
            tapped = due.tapped[begin : begin + MOST_AT_ONCE]
            lows = np.maximum(firsts, begin)
            counts = np.minimum(firsts + due.counts, begin + len(tapped)) - lows
            is_in = counts > 0
            self._compute(Due(due.rows[is_in], (due.starts + lows - firsts)[is_in], counts[is_in], tapped))

    def _compute(self, due: Due) -> None:
        token_rows, positions = self._of_tokens(due.rows, due.starts, due.counts)
        firsts = np.cumsum(due.counts) - due.counts
        token_ids = self._rows.token_ids[token_rows, positions + 1].astype(np.int64)
        features = self.head.features(due.tapped)
        stream = self._run(due.rows, due.starts, due.counts, upload(token_ids, self._device), features)
        self._keep(
            upload(due.rows.astype(np.int64), self._device), stream, upload(firsts + due.counts - 1, self._device)
        )

    def _keep(self, rows: torch.Tensor, stream: torch.Tensor, last: torch.Tensor) -> None:
        """rows: [n]; last: [n], the places of their last tokens in the stream that was computed."""
        self._streams[rows] = stream[last]

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Drafts of rows [n], of which all positions before starts [n] are computed: counts[i] >= 1 of row i ->
        [n, most] int32, of which as many count. Waits for the device."""
        most = int(counts.max())
        drafts = torch.zeros(most, len(rows), dtype=torch.int64, device=self._device)
        going, stream = np.arange(len(rows)), self._streams[upload(rows.astype(np.int64), self._device)]
        for place in range(most):
            token_ids = self.head.draft(stream)
            if len(going) == len(rows):
                drafts[place] = token_ids
            else:
                drafts[place, upload(going, self._device)] = token_ids
            left = np.flatnonzero(counts[going] > place + 1)
            if not len(left):
                break
            if len(left) < len(going):
                index = upload(left, self._device)
                going, token_ids, stream = going[left], token_ids[index], stream[index]
            ones = np.ones(len(going), dtype=np.int64)
            stream = self._run(rows[going], starts[going] + place, ones, token_ids, stream)
        return drafts.t().cpu().numpy().astype(np.int32)

    def draft_behind(
        self, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray, num_places: int, num_drafts: int
    ) -> DraftsBehind | None:
        """Computes the places of the step with drafts that a device computes now, and num_drafts >= 1 drafts after the
        last token that each of rows [n] will have gained in it. Row i has counts[i] of the num_places places, from
        firsts[i] on, and all its positions before are computed. Does not wait; None: it cannot, and has done nothing.
        """
        return None

    def run_padding(self, num_rows: int) -> int:
        """What some drafts of so many rows take: at position 0 of rows that have none -> how many."""
        rows = np.arange(num_rows) % len(self._rows.num_tokens)
        starts, ones = np.zeros(num_rows, dtype=np.int64), np.ones(num_rows, dtype=np.int64)
        stream = torch.zeros(num_rows, self.head.hidden_size, device=self._device)
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self.head.draft(self._run(rows, starts, ones, token_ids, stream)).cpu()
        return 1

    def _run(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        token_ids: torch.Tensor,
        features: torch.Tensor,
    ) -> torch.Tensor:
        """counts[i] positions of row rows[i] from starts[i] on -> the residual stream."""
        metadata, positions = self._metadata(rows, starts, counts)
        group = GroupContext.of(metadata, self._backend)
        return self.head.forward(token_ids, features, positions, ForwardContext((group,), *self._layer))

    def _metadata(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        """With the positions [num_tokens] int64."""
        query_start_loc = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        token_rows, positions = self._of_tokens(rows, starts, counts)
        seq_lens = (starts + counts).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        metadata = AttentionMetadata(
            num_tokens=len(token_rows),
            num_seqs=len(rows),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
            block_table_cpu=self._table.block_ids[rows, : -(-max_seq_len // self._table.block_size)],
            slot_mapping=upload(self._slots(token_rows, positions), self._device),
            num_decodes=len(rows) if len(token_rows) == len(rows) else 0,
        )
        return metadata, upload(positions, self._device)

    def _of_tokens(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """counts[i] positions of row rows[i] from starts[i] on: of each token its row and position."""
        firsts = np.cumsum(counts) - counts
        token_rows = np.repeat(rows, counts)
        return token_rows, np.arange(len(token_rows)) + np.repeat(starts - firsts, counts)

    def _slots(self, token_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What a shared block has of a cached token stays."""
        is_cached = positions < self._rows.num_cached_tokens[token_rows]
        return self._table.slots(token_rows, positions, is_cached if is_cached.any() else None)
