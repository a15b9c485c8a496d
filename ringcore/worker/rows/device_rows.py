"""The device's copy of the persistent batch: updated by the same deltas as the host's, as (index, word) writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.kernels.steps.step import write_words
from ringcore.kernels.steps.step_state import (
    LAST_TOKEN,
    NUM_CACHED,
    NUM_COMPUTED,
    NUM_PROMPT,
    NUM_STOPS,
    OFFSET_SHIFT,
    PARAMETERS,
    ROW_MASK,
    StateLayout,
)
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import NewRequest
from ringcore.worker.rows.drafts import Drafts
from ringcore.worker.rows.pinned_words import PinnedWords
from ringcore.worker.rows.request_rows import AppendedBlocks, RequestRows

__all__ = ["DeviceRows"]


class DeviceRows:
    """The state that the kernels of `kernels.step` read and write. The host's rows are authoritative for everything but
    the sampled tokens; this mirrors them."""

    def __init__(self, rows: RequestRows, device: torch.device, max_drafted: int = 0) -> None:
        """max_drafted: tokens of a decode step with drafts; 0: none has any."""
        max_rows, max_stops = rows.stop_token_ids.shape
        assert max_rows <= ROW_MASK.value, max_rows
        tables = rows.block_tables
        self.layout = StateLayout(
            max_rows,
            max_stops,
            tuple(table.block_size for table in tables),
            tuple(table.block_ids.shape[1] for table in tables),
            rows.parameters.dtype,
            max_drafted,
        )
        assert self.layout.num_words < 1 << 31, "the block tables are too large for 32-bit indices"
        self.state = self.layout.allocate(device)
        self._batch = np.full(self.layout.num_places, -1, dtype=np.int32)  # the device's batch after all pending writes
        self._places: list[np.ndarray] = []
        self._words: list[np.ndarray] = []
        self._pinned = PinnedWords(device)

    @property
    def batch(self) -> torch.Tensor:
        """[num_places] int32: the decoding rows, then -1 (padding)."""
        return self.state[self.layout.batch_at : self.layout.batch_at + self.layout.num_places]

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """By KV cache group: [max_rows, width] int32, stale behind a row's blocks."""
        layout, tables = self.layout, []
        for group, width in enumerate(layout.table_widths):
            at, stride = layout.table_at(group), layout.table_stride(group)
            tables.append(self.state[at : at + layout.max_rows * stride].view(-1, stride)[:, :width])
        return tuple(tables)

    # Changes are gathered on the host, then written by one kernel.

    def admit(self, requests: Iterable[NewRequest], rows: RequestRows) -> None:
        """Mirrors requests that `rows` has already admitted."""
        stops_at = self.layout.stops_at
        parameters = rows.parameters.view(np.int32).reshape(len(rows.parameters), -1)
        for request in requests:
            row, num_stops = request.row, len(request.stop_token_ids)
            record = np.zeros(stops_at + num_stops, dtype=np.int32)
            record[NUM_COMPUTED.value] = request.num_computed_tokens
            record[NUM_CACHED.value] = request.num_cached_tokens
            record[NUM_PROMPT.value] = request.num_prompt_tokens
            record[NUM_STOPS.value] = num_stops
            record[LAST_TOKEN.value] = request.token_ids[-1]
            record[PARAMETERS.value : stops_at] = parameters[row]
            record[stops_at:] = request.stop_token_ids
            self._add(self._record_at(row) + np.arange(len(record)), record)
            for group, block_ids in enumerate(request.block_ids):
                self._add(self._table_at(group, row) + np.arange(len(block_ids)), block_ids)

    def append(self, appended: Sequence[AppendedBlocks]) -> None:
        """Appended block table entries, by KV cache group."""
        layout = self.layout
        for group, (rows, columns, block_ids) in enumerate(appended):
            places = layout.table_at(group) + rows.astype(np.int64) * layout.table_stride(group) + columns
            self._add(places, block_ids)

    def set_batch(self, scheduled: np.ndarray, drafts: Drafts | None = None) -> None:
        """Sets the rows that decode from the next step on, one token each per step; or, for one step, with drafts."""
        places = scheduled
        if drafts is not None:
            spans = RowSpans(1, 1 + drafts.counts)
            offsets = spans.offsets(len(scheduled)).astype(np.int32)
            places = spans.repeat(scheduled) | offsets << OFFSET_SHIFT.value
            self._add(self.layout.drafts_at + np.flatnonzero(offsets), drafts.token_ids)
        n = len(places)
        changed = np.flatnonzero(self._batch[:n] != places)
        if len(changed):
            self._batch[changed] = places[changed]
            self._add(self.layout.batch_at + changed, places[changed])
        stale = n + np.flatnonzero(self._batch[n:] >= 0)  # become padding
        if len(stale):
            self._batch[stale] = -1
            self._add(self.layout.batch_at + stale, self._batch[stale])

    def set_last_tokens(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Launches the write of token_ids [n], on the device, as the last tokens of rows [n]. No other write of these
        rows may be pending."""
        places = self._record_at(rows.astype(np.int64)) + LAST_TOKEN.value
        write_words(self.state, upload(places.astype(np.int32), self.state.device), token_ids.int(), len(rows))

    def write(self) -> None:
        """Launches the gathered writes on the current stream; does not wait.

        No index occurs twice: a message admits a row once and appends after the row's last block, and the batch is set
        once before each write.
        """
        if not self._places:
            return
        places, words = np.concatenate(self._places), np.concatenate(self._words)
        self._places, self._words = [], []
        with self._pinned.filled(places, words) as (on_device_places, on_device_words):
            write_words(self.state, on_device_places, on_device_words, len(places))

    def _add(self, places: np.ndarray, words: np.ndarray) -> None:
        if len(places):
            self._places.append(places.astype(np.int32))
            self._words.append(words.astype(np.int32, copy=False))

    def _record_at(self, row: Any) -> Any:
        """Of one row, or of each of an array."""
        return self.layout.records_at + row * self.layout.record_words

    def _table_at(self, group: int, row: int) -> int:
        return self.layout.table_at(group) + row * self.layout.table_stride(group)
