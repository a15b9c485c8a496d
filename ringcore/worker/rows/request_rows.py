"""The persistent batch: the state of the running requests as row-indexed columns, updated by deltas.

On a CPU these numpy arrays are the device's own memory, so the next step's input is gathered from them directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.sampler import SamplingInputs
from ringcore.params.sampling_params import MAX_STOP_TOKEN_IDS
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_parameters import ROW_PARAMETERS, RowParameters
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.worker.rows.block_table import AppendedBlocks, BlockTable

__all__ = ["UNKNOWN_TOKEN", "AppendedBlocks", "RequestRows", "RowListener"]

UNKNOWN_TOKEN = -1
_NO_INDEX = np.zeros(0, dtype=np.int64)


class RowListener(Protocol):
    """Keeps its own per-row state; `RequestRows` notifies it when a row is admitted or cleared."""

    def admit(self, request: NewRequest) -> None: ...

    def clear(self, rows: np.ndarray) -> None:
        """rows: [n], not empty; a row may be unused already."""
        ...


class RequestRows:
    """Rows 0 to max_num_seqs - 1; a request keeps its row from its admission until it finishes or is preempted.

    Of a row in use: num_computed_tokens <= num_tokens, the first num_tokens of `token_ids` are known, and the slots of
    the first num_cached_tokens were filled before the row was admitted (prefix cache). An unused row has no tokens and
    no blocks.
    """

    def __init__(
        self,
        max_num_seqs: int,
        kv_cache: KVCacheConfig,
        num_eos_tokens: int,
        listeners: Sequence[RowListener] = (),
        parameters: RowParameters = ROW_PARAMETERS,
    ) -> None:
        self._listeners = [*listeners]
        self._record = parameters.record
        self.block_tables = [  # by KV cache group
            BlockTable(max_num_seqs, kv_cache.max_model_len, group.spec.block_size) for group in kv_cache.groups
        ]
        self.scheduled = int_array()  # [n]: the rows of the last step
        # np.zeros commits pages on first touch, so that unused rows cost nothing.
        self.token_ids = np.zeros((max_num_seqs, kv_cache.max_model_len), dtype=np.int32)
        self.stop_token_ids = np.zeros((max_num_seqs, MAX_STOP_TOKEN_IDS + num_eos_tokens), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_cached_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_stop_token_ids = np.zeros(max_num_seqs, dtype=np.int64)
        self.parameters = np.zeros(max_num_seqs, dtype=parameters.dtype)  # records: parameters["top_k"] is a column
        # Admissions of each row since the start: distinguishes the requests that have used a row.
        self.num_admissions = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, delta: SchedulerOutput) -> list[AppendedBlocks]:
        """Applies what changed since the last step, in the order of the message's fields.

        -> the appended block table entries by KV cache group; empty where the message appends none.
        """
        self._clear(delta.finished_rows)
        for request in delta.new_requests:
            self.admit(request)
        appended = []
        if delta.new_blocks:
            tables = zip(self.block_tables, delta.new_blocks, strict=True)
            appended = [table.append(new.rows, new.block_ids) for table, new in tables]
        if delta.rows is not None:
            self.scheduled = delta.rows.copy()  # the message's memory may be the sender's ring buffer
        return appended

    def add_listener(self, listener: RowListener) -> None:
        """To be notified of rows that are admitted or cleared from now on."""
        self._listeners.append(listener)

    def clear(self) -> None:
        """Clears every row."""
        self._clear(np.flatnonzero(self.num_tokens))
        self.scheduled = int_array()

    def _clear(self, rows: np.ndarray) -> None:
        if len(rows):
            self.num_tokens[rows] = 0
            self.num_computed_tokens[rows] = 0
            self.num_cached_tokens[rows] = 0
            for table in self.block_tables:
                table.clear(rows)
            for listener in self._listeners:
                listener.clear(rows)

    def admit(self, request: NewRequest) -> None:
        """Into a row that is not in use; a step does it by `apply`."""
        row, num_tokens = request.row, len(request.token_ids)
        assert not self.num_tokens[row], f"row {row} is in use"
        assert request.num_computed_tokens < num_tokens <= self.token_ids.shape[1]
        assert request.num_computed_tokens <= request.num_cached_tokens <= num_tokens
        self.num_admissions[row] += 1
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_cached_tokens[row] = request.num_cached_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table.set(row, block_ids)
        self.stop_token_ids[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self.num_stop_token_ids[row] = len(request.stop_token_ids)
        self.parameters[row] = self._record(request)
        for listener in self._listeners:
            listener.admit(request)

    def advance(self, rows: np.ndarray, num_scheduled_tokens: np.ndarray | None) -> None:
        """Counts the scheduled tokens of `rows` as computed; num_scheduled_tokens None: one each."""
        self.num_computed_tokens[rows] += 1 if num_scheduled_tokens is None else num_scheduled_tokens

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray | int, counts: np.ndarray | None = None) -> None:
        """Appends one sampled token per row, its next input. `UNKNOWN_TOKEN`: only the device has the token.

        counts: tokens of each row, at least 1; the last is its next input, and those before it count as computed: they
        are accepted drafts. token_ids: [num_tokens], row-major.
        """
        if counts is None:
            self.token_ids[rows, self.num_tokens[rows]] = token_ids
            self.num_tokens[rows] += 1
            return
        spans = RowSpans(1, counts)
        places = spans.repeat(self.num_tokens[rows]) + spans.offsets(len(rows))
        self.token_ids[spans.repeat(rows), places] = token_ids
        self.num_tokens[rows] += counts
        self.num_computed_tokens[rows] += counts - 1

    def learn_tokens(self, rows: np.ndarray, token_ids: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> None:
        """Tokens of rows [n] that only the device had: counts[i] >= 1 from position begins[i] on, of which one was
        appended as unknown, and the others are appended now. token_ids: [num_tokens], row-major."""
        spans = RowSpans(1, counts)
        self.token_ids[spans.repeat(rows), spans.repeat(begins) + spans.offsets(len(rows))] = token_ids
        self.num_tokens[rows] += counts - 1
        self.num_computed_tokens[rows] += counts - 1

    def generated(self, row: int) -> np.ndarray:
        """[num_generated] int32, a view; `UNKNOWN_TOKEN` where only the device has the token."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def sampling_inputs(self, rows: np.ndarray) -> SamplingInputs:
        """The sampling parameters of `rows` [n], whose next token has the position num_tokens."""
        parameters = self.parameters.take(rows)  # indexing copies records field by field
        masked_rows, masked_ids = self._masked_stop_tokens(rows, parameters["min_tokens"])
        return SamplingInputs(parameters, self.num_tokens[rows], masked_rows, masked_ids)

    def _masked_stop_tokens(self, rows: np.ndarray, min_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stop tokens to mask, of rows that have not generated min_tokens yet: (index into `rows`, token id)."""
        if not min_tokens.any():
            return _NO_INDEX, _NO_INDEX
        num_generated = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        early = np.flatnonzero(num_generated < min_tokens)
        counts = self.num_stop_token_ids[rows[early]]
        is_used = np.arange(self.stop_token_ids.shape[1]) < counts[:, None]
        return np.repeat(early, counts), self.stop_token_ids[rows[early]][is_used].astype(np.int64)
