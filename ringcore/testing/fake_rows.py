"""A fake worker's rows (persistent batch), and checks that a step is valid: block tables, slots, token counts.

Every `assert` here checks a message of the engine: it fails for a bug of the engine, never for a user error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringcore.kv_cache.spec import KVCacheConfig, KVCacheGroup, LocalAttentionSpec
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.testing.step_cost import StepWork

__all__ = ["FakeRows", "StepRows"]


class StepRows(NamedTuple):
    """The rows of a step and the tokens that each computes (per step, in a multi-step message)."""

    rows: np.ndarray  # [n]
    num_scheduled_tokens: np.ndarray  # [n] int64
    work: StepWork


class FakeRows:
    """The rows 0 to max_num_seqs - 1, as columns; a row is in use while it has tokens.

    Invariant of a row in use: num_computed_tokens <= num_tokens <= max_model_len, and in every KV cache group its block
    table has slots for the computed tokens. A block of a full-attention group belongs to a single row, except blocks
    that rows share as a cached prefix.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, config: KVCacheConfig) -> None:
        self._max_num_batched_tokens, self._max_model_len = max_num_batched_tokens, config.max_model_len
        self.has_windows = any(isinstance(group.spec, LocalAttentionSpec) for group in config.groups)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.max_total_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # the request's maximum length
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_users = np.zeros(config.num_blocks, dtype=np.int32)  # reference counts in full-attention groups
        self._tables = [BlockTable(group, self._num_users, max_num_seqs, config) for group in config.groups]
        self._last: np.ndarray | None = None
        self._unfinished_rows: np.ndarray | None = None  # cached result of `unfinished_rows`, reset by a step

    def apply(self, step: SchedulerOutput) -> StepRows:
        """Applies the changes of a step to the rows, and checks what it schedules."""
        self._unfinished_rows = None
        self._clear(step.finished_rows)
        for request in step.new_requests:
            self._start(request)
        self._append_blocks(step)
        rows, num_scheduled = self._scheduled(step)
        self._last = rows
        work = self._check(step, rows, num_scheduled)
        return StepRows(rows, num_scheduled, work)

    def clear(self) -> None:
        """Clears all rows."""
        self._unfinished_rows = None
        self._clear(np.flatnonzero(self.num_tokens))
        self._last = None

    @property
    def num_in_use(self) -> int:
        return int(np.count_nonzero(self.num_tokens))

    # -----------------------------------------------------------------------------------------------------------
    # Changes of the rows.

    def _clear(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            assert 0 <= row < len(self.num_tokens), f"finished row {row} is no row"
            assert self.num_tokens[row], f"finished row {row} is not in use"
            for table in self._tables:
                table.clear(row)
            self.num_tokens[row] = self.num_computed_tokens[row] = 0
            self.max_total_tokens[row] = 0

    def _start(self, request: NewRequest) -> None:
        row, num_tokens, params = request.row, len(request.token_ids), request.sampling_params
        assert 0 <= row < len(self.num_tokens), f"row {row} is no row"
        assert not self.num_tokens[row], f"row {row} is given to a second request"
        assert 0 < num_tokens <= self._max_model_len, f"a request of {num_tokens} tokens"
        assert 0 < request.num_prompt_tokens <= num_tokens
        assert 0 <= request.num_computed_tokens <= request.num_cached_tokens <= num_tokens
        assert request.num_computed_tokens < num_tokens, "nothing is left to compute"
        assert len(request.block_ids) == len(self._tables), "a block table for each KV cache group"
        for table, ids in zip(self._tables, request.block_ids, strict=True):
            table.start(row, ids, request.num_computed_tokens, request.num_cached_tokens)
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        limit = self._max_model_len if params.max_tokens is None else request.num_prompt_tokens + params.max_tokens
        self.max_total_tokens[row] = min(limit, self._max_model_len)
        self.seed[row] = request.seed

    def _append_blocks(self, step: SchedulerOutput) -> None:
        assert len(step.new_blocks) in (0, len(self._tables)), "new blocks for each KV cache group, or for none"
        for table, new in zip(self._tables, step.new_blocks, strict=False):
            by_row: dict[int, list[int]] = {}
            for row, block_id in zip(new.rows.tolist(), new.block_ids.tolist(), strict=True):
                by_row.setdefault(row, []).append(block_id)
            for row, ids in by_row.items():
                assert self.num_tokens[row], f"blocks for row {row}, which is not in use"
                table.append(row, np.array(ids, dtype=np.int32))

    # -----------------------------------------------------------------------------------------------------------
    # Scheduled tokens.

    def _scheduled(self, step: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
        if step.rows is None:
            assert self._last is not None, "the rows of the previous step, and there was none"
            assert step.num_scheduled_tokens is None, "repeated rows must decode one token each"
            assert not len(step.finished_rows), "rows have finished, and the step repeats those of the previous step"
            rows = self._last
        else:
            rows = step.rows
            numbers = rows.tolist()
            assert len(set(numbers)) == len(numbers), "a row is twice in one step"
            if numbers:
                assert 0 <= min(numbers) <= max(numbers) < len(self.num_tokens), "a row that is no row is scheduled"
                assert all(self.num_tokens[numbers].tolist()), "a row that is not in use is scheduled"
        if step.num_scheduled_tokens is None:
            return rows, np.ones(len(rows), dtype=np.int64)
        assert len(step.num_scheduled_tokens) == len(rows), "a number of tokens for each row"
        assert (step.num_scheduled_tokens >= 1).all(), "a row is scheduled for no token"
        return rows, step.num_scheduled_tokens.astype(np.int64)

    def _check(self, step: SchedulerOutput, rows: np.ndarray, num_scheduled: np.ndarray) -> StepWork:
        known, after = self.num_tokens[rows], self.num_computed_tokens[rows] + num_scheduled
        num_tokens, more_steps = int(num_scheduled.sum()), step.num_steps - 1
        assert more_steps >= 0
        assert (after <= known).all(), "a step computes tokens that the row does not have"
        drafts = self._drafts(step, known - after)
        num_drafts = int(drafts.sum())
        assert num_tokens + num_drafts <= self._max_num_batched_tokens, (
            f"{num_tokens + num_drafts} tokens exceed the budget of a step"
        )
        assert step.num_tokens == num_tokens * step.num_steps, "num_tokens is not what is scheduled"
        if more_steps:
            assert num_tokens == len(rows), "several steps are of one token each"
            assert (after == known).all(), "several steps, and a row has more than one token to compute"
        for table in self._tables:
            assert (after + more_steps + drafts <= table.num_slots(rows)).all(), "tokens without blocks"
        return StepWork(num_tokens + num_drafts, len(rows), int(after.sum()) + num_drafts)

    @staticmethod
    def _drafts(step: SchedulerOutput, num_left: np.ndarray) -> np.ndarray:
        """The most drafts of each row, of which num_left known tokens are not computed after the step."""
        if step.max_gained is None:
            return np.zeros(len(num_left), dtype=np.int64)
        assert step.num_steps == 1, "several steps, and drafts"
        assert len(step.max_gained) == len(num_left), "the most tokens that each row gains"
        assert (step.max_gained >= 1).all(), "a row must gain no token"
        drafts: np.ndarray = step.max_gained.astype(np.int64) - 1
        assert not num_left[drafts > 0].any(), "drafts of a row that does not sample"
        return drafts

    def advance(self, rows: np.ndarray, num_scheduled: np.ndarray) -> np.ndarray:
        """Marks these tokens as computed; returns the rows that sample now, as a mask over `rows`."""
        after = self.num_computed_tokens[rows] + num_scheduled
        self.num_computed_tokens[rows] = after
        sampling: np.ndarray = after == self.num_tokens[rows]
        return sampling

    def append_tokens(self, rows: np.ndarray, num_gained: np.ndarray | int) -> None:
        """Appends `num_gained` sampled tokens to each row, of which all but the last are computed."""
        self._unfinished_rows = None
        assert (self.num_tokens[rows] + num_gained <= self._max_model_len).all(), "tokens past max_model_len"
        self.num_tokens[rows] += num_gained
        self.num_computed_tokens[rows] += num_gained - 1

    # -----------------------------------------------------------------------------------------------------------
    # Lookahead of the simulator: how far the engine gets without a scheduling event.

    def unfinished_rows(self) -> np.ndarray:
        """The rows with fewer tokens than their request's maximum length."""
        if self._unfinished_rows is None:
            self._unfinished_rows = (self.num_tokens < self.max_total_tokens).nonzero()[0]
        return self._unfinished_rows

    def decode_work(self) -> StepWork:
        """The work of a step in which every unfinished row decodes one token."""
        rows = self.unfinished_rows()
        return StepWork(len(rows), len(rows), int(self.num_computed_tokens[rows].sum()) + len(rows))

    def is_decoding(self) -> bool:
        """Whether every unfinished row has exactly one token to compute (pure decode)."""
        rows = self.unfinished_rows()
        return bool((self.num_tokens[rows] - self.num_computed_tokens[rows] == 1).all())

    def steps_to_next_end(self) -> int:
        """The fewest tokens that an unfinished row still has to sample; a huge number if there is none."""
        rows = self.unfinished_rows()
        return int((self.max_total_tokens[rows] - self.num_tokens[rows]).min(initial=1 << 40))

    def blocks_missing(self, num_steps: int) -> int:
        """The blocks to allocate before every unfinished row can compute `num_steps` more tokens."""
        rows = self.unfinished_rows()
        num_tokens = self.num_computed_tokens[rows] + num_steps
        return sum(table.blocks_missing(rows, num_tokens) for table in self._tables)


class BlockTable:
    """The block tables of all rows in one KV cache group."""

    def __init__(self, group: KVCacheGroup, num_users: np.ndarray, max_num_seqs: int, config: KVCacheConfig) -> None:
        self._spec = group.spec
        self._block_size = group.spec.block_size
        self._num_users = None if isinstance(group.spec, LocalAttentionSpec) else num_users
        max_num_blocks = -(-config.max_model_len // self._block_size)
        # np.zeros allocates pages on first touch: rows never used cost nothing.
        self._ids = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._pool_size = config.num_blocks

    def start(self, row: int, ids: np.ndarray, num_computed_tokens: int, num_cached_tokens: int) -> None:
        num_shared, rest = divmod(num_cached_tokens, self._block_size)
        num_null_blocks = 0
        if isinstance(self._spec, LocalAttentionSpec):
            num_null_blocks = self._spec.first_live_token(num_computed_tokens) // self._block_size
        else:
            assert not rest, f"a cached prefix of {num_cached_tokens} tokens ends within a block"
        held = ids[num_null_blocks:]
        self._check_ids(held, len(ids))
        if self._num_users is not None:
            assert num_shared <= len(ids), "blocks of the cached prefix are missing"
            assert not self._num_users[ids[num_shared:]].any(), "a block to be written is shared with another row"
            self._num_users[ids] += 1
        self._ids[row, : len(ids)] = ids
        self._num_blocks[row] = len(ids)

    def append(self, row: int, ids: np.ndarray) -> None:
        begin = int(self._num_blocks[row])
        end = begin + len(ids)
        self._check_ids(ids, end)
        if self._num_users is not None:
            assert not self._num_users[ids].any(), "a block to be written is shared with another row"
            self._num_users[ids] += 1
        self._ids[row, begin:end] = ids
        self._num_blocks[row] = end

    def _check_ids(self, ids: np.ndarray, num_blocks: int) -> None:
        """Checks blocks to be appended to a table, which then has `num_blocks`."""
        assert num_blocks <= self._ids.shape[1], "more blocks than the longest request has"
        if len(ids):
            assert 0 < ids.min() <= ids.max() < self._pool_size, "the null block, or a block outside the cache"
            assert len(set(ids.tolist())) == len(ids), "a block is twice in one block table"

    def clear(self, row: int) -> None:
        if self._num_users is not None:
            self._num_users[self._ids[row, : self._num_blocks[row]]] -= 1
        self._num_blocks[row] = 0

    def num_slots(self, rows: np.ndarray) -> np.ndarray:
        slots: np.ndarray = self._num_blocks[rows] * self._block_size
        return slots

    def blocks_missing(self, rows: np.ndarray, num_tokens: np.ndarray) -> int:
        needed = -(-num_tokens // self._block_size) - self._num_blocks[rows]
        return int(np.maximum(needed, 0).sum())
