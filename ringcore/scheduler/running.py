"""The running requests and their resources, a row, blocks and columns: `start` allocates all, `stop` frees all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ringcore.kv_cache.manager import CachedPrefix, KVCacheManager
from ringcore.protocol.steps import NewRequest
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.stop_tokens import StopTokens

__all__ = ["RunningRequests"]


class RunningRequests:
    """The running batch. Owns the rows of the persistent batch and the bookkeeping of the KV cache.

    Invariant: every row belongs to one running request or is in the heap `_free_rows`; `finished_rows` are the freed
    rows not reported to the workers yet. A running request has its columns in `table`, its blocks in `kv_cache`, and
    its stop tokens counted in `stop_tokens`; any other request has none of these.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, kv_cache: KVCacheManager) -> None:
        self.kv_cache = kv_cache
        self.table = RunningTable(max_num_seqs, kv_cache.config.max_model_len)
        self.stop_tokens = StopTokens(vocab_size)
        self.finished_rows: list[int] = []
        self._starting: list[tuple[int, Request, CachedPrefix]] = []  # in their rows, until `finish_starts`
        self._free_rows = list(range(max_num_seqs))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def start(self, request: Request, prefix: CachedPrefix, num_tokens: int) -> bool:
        """Starts a request, whose first step computes `num_tokens` after the cached ones. False, and nothing changed,
        if too few blocks are free. It runs after `finish_starts`, before which nothing else happens.

        It gets the blocks of all its tokens at once: a chunked prefill admitted with blocks for its first chunk alone
        could run out of blocks half way, and its work would be lost.
        """
        row, num_tokens_now = self._free_rows[0], prefix.num_computed_tokens + num_tokens
        if not self.kv_cache.reserve(row, request, request.num_tokens_to_hold, num_tokens_now, prefix):
            return False
        heapq.heappop(self._free_rows)
        self._starting.append((row, request, prefix))
        return True

    def finish_starts(self, now_s: float) -> list[NewRequest]:
        """Allocates blocks and columns of all requests that started; the messages for the workers, in their order."""
        if not self._starting:
            return []
        starting, self._starting = self._starting, []
        rows, requests, prefixes = zip(*starting, strict=True)
        at_rows = np.array(rows)
        self.kv_cache.allocate_reserved()
        computed = [prefix.num_computed_tokens for prefix in prefixes]
        first_run = self.table.add(requests, rows, computed, self.kv_cache.capacity[at_rows])
        for run, (row, request, prefix) in enumerate(starting, first_run):
            request.start(row, run, prefix.num_computed_tokens, now_s)
            if request.stop_token_ids:
                self.stop_tokens.add(request.stop_token_ids)
        return list(map(_message, rows, requests, prefixes, self.kv_cache.block_ids_of(at_rows)))

    def stop(self, requests: Sequence[Request]) -> None:
        """Frees all their resources. Their computed blocks stay in the prefix cache until evicted."""
        if not requests:
            return
        table = self.table
        freed = [request.row for request in requests if request.row is not None]
        rows = np.array(freed)
        positions = table.positions_of(rows)
        self.kv_cache.publish(rows, table.token_ids, table.confirmed[positions])
        self.kv_cache.free_rows(rows)
        for request, row in zip(requests, freed, strict=True):
            if request.stop_token_ids:
                self.stop_tokens.remove(request.stop_token_ids)
            heapq.heappush(self._free_rows, row)
        self.finished_rows += freed
        table.remove(positions)

    def preempt(self, position: int, now_s: float) -> Request:
        """Preempts one by recompute: it keeps its tokens, and none of them counts as computed."""
        request = self.table.request_at(position)
        tokens = self.table.tokens_of(position)
        num_total, num_computed = int(self.table.total[position]), int(self.table.computed[position])
        self.stop([request])
        request.preempt(tokens, num_total_tokens=num_total, num_computed_tokens=num_computed, now_s=now_s)
        return request

    def publish(self) -> None:
        """Publishes all confirmed blocks in the prefix cache, for requests of the waiting queue."""
        if self.table.num:
            self.kv_cache.publish(self.table.row, self.table.token_ids, self.table.confirmed)

    def release_windows(self) -> bool:
        """Frees blocks that have left their sliding window; whether there were any."""
        if not self.kv_cache.has_windows or not self.table.num:
            return False
        self.publish()
        return self.kv_cache.release_window(self.table.row, self.table.confirmed)

    def change_workers(self, kv_cache: KVCacheManager) -> None:
        """Switches to new workers, which have no rows, and to a new cache. No request runs."""
        assert self.table.num == 0, "a running request has blocks of the old cache"
        self.kv_cache = kv_cache
        self.finished_rows.clear()

    def check(self) -> None:
        """Asserts the invariants."""
        table = self.table
        table.check()
        rows = table.row.tolist()
        assert not self._starting, "a request has started, and does not run"
        assert sorted([*rows, *self._free_rows]) == list(range(len(table.requests))), "a row is lost, or twice"
        assert len(set(self.finished_rows)) == len(self.finished_rows), "a row is to be reported twice"
        assert table.capacity.tolist() == self.kv_cache.capacity[rows].tolist(), "capacity disagrees with the cache"
        self.stop_tokens.check(token_id for request in table.in_order() for token_id in request.stop_token_ids)
        confirmed = dict(zip(rows, table.confirmed.tolist(), strict=True))
        self.kv_cache.check(dict(zip(rows, table.computed.tolist(), strict=True)), confirmed)


def _message(row: int, request: Request, prefix: CachedPrefix, block_ids: list[np.ndarray]) -> NewRequest:
    return NewRequest(
        row,
        request.tokens,
        request.num_prompt_tokens,
        prefix.num_computed_tokens,
        prefix.num_cached_tokens,
        block_ids,
        request.sampling_params,
        request.seed,
        request.stop_token_ids,
        request.bad_words_token_ids,
        request.extra_keys.cache_salt,
    )
