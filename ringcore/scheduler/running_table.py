"""The running requests as columns: a few numpy calls apply a step to all of them.

    position     0     1     2    ...  num - 1       dense, in the order of admission; moves up when a request leaves
    row          3     0     7    ...                the worker's row, fixed while the request runs
    known        ...                                 tokens that are known
    total        ...                                 and the most that steps in flight will sample: known <= total
    computed     ...                                 the most scheduled so far: confirmed <= computed <= total
    confirmed    ...                                 of these, computed by steps whose results have arrived
    last_step    ...                                 its last one in which not every running request decodes
    ...

Matrices by row, like the token ids, do not move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringcore.protocol.row_spans import ONE_EACH, RowSpans
from ringcore.scheduler.request import Request

__all__ = ["RunningTable"]

_COLUMNS = (
    "row",
    "run",
    "total",
    "computed",
    "confirmed",
    "known",
    "end",
    "last_step",
    "capacity",
    "max_total",
    "max_gain",
    "priority",
    "sequence",
)
# Neighbouring columns, to which a step of all adds the same.
_SCHEDULED = slice(_COLUMNS.index("total"), _COLUMNS.index("computed") + 1)
_ARRIVED = slice(_COLUMNS.index("confirmed"), _COLUMNS.index("end") + 1)
_ONE = np.array(1)  # numpy takes as long to convert a Python number as to add it
_LINE_TOKENS = 16  # of int32, in a cache line


class RunningTable:
    """Columns of `num` int64 each, as attributes; they are views, valid until `add` or `remove`.

    row: the worker's row. run: a unique number for each start of a request, which tells its results in flight from
    those of the row's previous owner. end: where its next token goes in a flat view of the token ids. capacity: tokens
    that have slots in the KV cache. max_total: the length at which the request ends. max_gain: the most tokens that it
    may gain in a step. priority, sequence: the request's.

    `version` changes with each `add` and `remove`. `min_room` is a lower bound of `max_total - total` over all.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        # No wider than requests run: so a step adds to several columns in one plain loop over contiguous memory.
        self._matrix = np.zeros((len(_COLUMNS), 0), dtype=np.int64)
        # np.zeros commits memory on first touch, so that rows which never run cost nothing. A row has an odd number of
        # cache lines: by a power of two the ends of all rows would share a few places in the CPU cache.
        self._stride = (-(-max_model_len // _LINE_TOKENS) | 1) * _LINE_TOKENS
        self._all_token_ids = np.zeros(max_num_seqs * self._stride, dtype=np.int32)
        self.token_ids = self._all_token_ids.reshape(max_num_seqs, -1)[:, :max_model_len]  # by row: the known tokens
        self.requests: list[Request | None] = [None] * max_num_seqs  # by row
        self._positions = np.zeros(max_num_seqs, dtype=np.int64)  # by row, of rows in use
        self._runs = np.full(max_num_seqs, -1, dtype=np.int64)  # by row; -1 of rows not in use
        self._num_runs = 0
        self.num = 0
        self.version = 0
        self.min_room = 0
        self.has_prefill = False  # whether a request may have more than one token to compute
        self.has_drafts = False  # whether one may gain several tokens in a step
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        (
            self.row,
            self.run,
            self.total,
            self.computed,
            self.confirmed,
            self.known,
            self.end,
            self.last_step,
            self.capacity,
            self.max_total,
            self.max_gain,
            self.priority,
            self.sequence,
        ) = self._matrix
        self._scheduled, self._arrived = self._matrix[_SCHEDULED], self._matrix[_ARRIVED]
        self.row_ids = self.row.astype(np.int32)  # int32 as in messages; like `run_ids` never changed in place
        self.run_ids = self.run.copy()

    def add(
        self, requests: Sequence[Request], rows: Sequence[int], computed: Sequence[int], capacity: np.ndarray
    ) -> int:
        """Appends requests that start, each in its row with its known tokens, of which computed[i] are computed.
        -> the run of the first; those of the others follow."""
        first, begin, end = self._num_runs, self.num, self.num + len(requests)
        self._num_runs += len(requests)
        lengths = [len(request.tokens) for request in requests]
        ends = [row * self._stride + length for row, length in zip(rows, lengths, strict=True)]
        columns = (
            rows,
            range(first, self._num_runs),
            lengths,
            computed,
            computed,
            lengths,
            ends,
            [-1] * len(requests),
            capacity,
            [request.max_total_tokens for request in requests],
            [request.max_gain for request in requests],
            [request.priority for request in requests],
            [request.sequence for request in requests],
        )
        self._matrix = np.concatenate((self._matrix, np.array(columns)), axis=1)
        self.num = end
        self._changed()
        for request, row, length, its_end in zip(requests, rows, lengths, ends, strict=True):
            self._all_token_ids[its_end - length : its_end] = request.tokens
            self.requests[row] = request
        at = self.row[begin:]
        self._positions[at], self._runs[at] = np.arange(begin, end), self.run[begin:]
        room = int((self.max_total[begin:] - self.total[begin:]).min())
        self.min_room = min(self.min_room, room) if begin else 0
        self.has_drafts |= bool((self.max_gain[begin:] > 1).any())
        return first

    def remove(self, positions: np.ndarray) -> None:
        """Removes these [n]; the others keep their order."""
        keep = np.ones(self.num, dtype=bool)
        keep[positions] = False
        left = self.row[~keep]
        self._runs[left] = -1
        for row in left.tolist():
            self.requests[row] = None
        begin, num = int(positions.min()), self.num - len(positions)
        self._matrix = self._matrix.compress(keep, axis=1)  # contiguous, which an index does not promise
        self.num = num
        self._changed()
        self._positions[self.row[begin:]] = np.arange(begin, num)
        if self.has_drafts:
            self.has_drafts = bool((self.max_gain > 1).any())

    def append_tokens(self, positions: np.ndarray | slice, token_ids: np.ndarray, spans: RowSpans) -> None:
        """Appends known tokens to each of these: token_ids [num_tokens], of which row i of `spans` goes to the i-th."""
        self._store(self.end[positions], token_ids, spans)
        self.known[positions] += spans.per_row
        self.end[positions] += spans.per_row

    def append_to_all(self, token_ids: np.ndarray, each: int) -> None:
        """Appends `each` tokens to every request, and confirms as many."""
        self._store(self.end, token_ids, ONE_EACH if each == 1 else RowSpans(each))
        self._arrived += _ONE if each == 1 else each

    def _store(self, ends: np.ndarray, token_ids: np.ndarray, spans: RowSpans) -> None:
        if spans.counts is not None or spans.each > 1:
            ends = spans.repeat(ends) + spans.offsets(len(ends))
        self._all_token_ids[ends] = token_ids

    def schedule_all(self, num_tokens: int) -> None:
        """A step computes and samples `num_tokens` tokens of each."""
        self._scheduled += _ONE if num_tokens == 1 else num_tokens
        self.min_room -= num_tokens

    def confirm_gains(self, positions: np.ndarray | slice, most: np.ndarray, gained: np.ndarray | int) -> None:
        """Replaces the upper bounds of a step, the `most` tokens that each may gain, by what its output says. Of the
        tokens that a request gains all but the last are computed.
        """
        self.computed[positions] -= most - gained
        self.total[positions] -= most - gained
        self.confirmed[positions] += gained - 1

    def position_of(self, request: Request) -> int:
        assert request.row is not None
        return int(self._positions[request.row])

    def positions_of(self, rows: np.ndarray) -> np.ndarray:
        """[n] int64: of rows in use."""
        positions: np.ndarray = self._positions[rows]
        return positions

    def request_at(self, position: int) -> Request:
        return self.request_in(int(self.row[position]))

    def request_in(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None
        return request

    def positions_of_runs(self, rows: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """[n] int64: the position of each (row, run) pair; -1 if that run has ended."""
        return np.where(self._runs[rows] == runs, self._positions[rows], -1)

    def tokens_of(self, position: int) -> np.ndarray:
        """A copy of its known tokens: [known] int32."""
        return self.token_ids[self.row[position], : self.known[position]].copy()

    def room(self) -> int:
        """The least number of tokens that a request may still sample after those in flight. The table is not empty."""
        if self.min_room <= 0:
            self.min_room = int((self.max_total - self.total).min())
        return self.min_room

    def in_order(self) -> list[Request]:
        return [self.request_at(position) for position in range(self.num)]

    def check(self) -> None:
        """Asserts the invariants between two operations."""
        rows = self.row.tolist()
        assert len(set(rows)) == self.num, "a row twice"
        assert self._positions[rows].tolist() == list(range(self.num)), "rows and positions disagree"
        assert self._runs[rows].tolist() == self.run.tolist() == self.run_ids.tolist(), "rows and runs disagree"
        assert self.row_ids.tolist() == rows, "row_ids are stale"
        assert self._matrix.flags.c_contiguous, "a step of all takes a slow loop"
        in_use = {row for row, request in enumerate(self.requests) if request is not None}
        assert in_use == set(rows) == set(np.flatnonzero(self._runs >= 0).tolist()), "a row is in use without a request"
        for position, row in enumerate(rows):
            request = self.requests[row]
            assert request is not None, "a row runs without a request"
            assert (request.row, request.run) == (row, self.run[position]), "not its row's owner"
        assert (self.end == self.row * self._stride + self.known).all(), "an end is stale"
        assert (self.confirmed <= self.computed).all()
        assert (self.computed <= self.total).all()
        assert (self.known <= self.total).all()
        assert (self.total <= self.max_total).all(), "a step in flight samples past the last token"
        assert (self.known < self.max_total).all(), "it has all its tokens and is not finished"
        assert (self.computed <= self.capacity).all(), "computed tokens without a slot"
        assert not self.num or self.min_room <= (self.max_total - self.total).min(), "min_room is too large"
        assert self.has_drafts == any(request.max_gain > 1 for request in self.in_order()), "has_drafts is stale"
        assert self.has_prefill or (self.total - self.computed <= 1).all(), "a prefill was missed"
