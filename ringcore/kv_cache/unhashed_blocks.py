"""Cached blocks without a hash: of what a row computes, the first new block has one, and those after it a `Tail`.

    hash   h0   h1   h2    .    .    .    .      a prompt of 7 blocks of which the first two were cached
                     ╰─ parent of the tail of the other four, by which a lookup finds it

A lookup that comes to the parent gives the blocks of the tail their hashes, from the tokens that the cache has of them,
and goes on. Most prompts share no more than their beginning with any other, so most blocks are evicted before that.

The pool frees the blocks of a tail from its last to its first, and evicts them in that order, before their parent: a
request that references a block of a sequence references all blocks before it. A lookup that hits only a part of a tail
hashes its blocks first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np

from ringcore.kv_cache.block_hash import BlockHasher, ExtraKeys, block_bytes
from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.cache_user import CacheUser

__all__ = ["Span", "UnhashedBlocks"]

Span: TypeAlias = tuple[int, int, int, CacheUser]  # a row's blocks from one number to another, and its request


class Tail:
    """The blocks of one request from number `begin` on. hashes: the request's, of at least the blocks before."""

    __slots__ = ("begin", "extra_keys", "hashes", "ids", "parent", "stamps")

    def __init__(
        self, hashes: list[bytes], extra_keys: ExtraKeys, begin: int, ids: np.ndarray, stamps: np.ndarray
    ) -> None:
        self.hashes, self.extra_keys, self.begin = hashes, extra_keys, begin
        self.parent = hashes[begin - 1]
        self.ids, self.stamps = ids, stamps  # [n] int64 each: the blocks, and the pool's stamps of them

    def append(self, ids: np.ndarray, stamps: np.ndarray) -> None:
        self.ids, self.stamps = np.concatenate((self.ids, ids)), np.concatenate((self.stamps, stamps))


class UnhashedBlocks:
    """The tails in a cache of one group. tokens_of: the tokens of blocks [n], [n, block_size] int32.

    Invariant: each block with a stamp is in one tail, whose parent is cached.
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher, tokens_of: Callable[[np.ndarray], np.ndarray]) -> None:
        self._pool, self._hasher, self._tokens_of = pool, hasher, tokens_of
        self._tails: dict[bytes, Tail] = {}  # by parent
        self._of_row: dict[int, Tail] = {}  # its last one
        pool.on_forgotten = self._forget

    def publish(self, spans: Sequence[Span], token_ids: np.ndarray, ids: np.ndarray) -> None:
        """Caches blocks in use: ids [n] int64 are those of the spans, one after the other. token_ids: by row, int32."""
        stamps, at = self._pool.stamp(ids), 0
        prompts: list[tuple[int, CacheUser, int, int]] = []  # that share nothing, as most do: those in a row at once
        for row, begin, end, user in spans:
            first, at = at, at + end - begin
            if begin == 0 and len(user.block_hashes) == 1:
                prompts.append((row, user, first, at))
                continue
            if prompts:
                self._publish_prompts(prompts, token_ids, ids, stamps)
                prompts = []
            self._publish(row, user, token_ids, begin, ids[first:at], stamps[first:at])
        if prompts:
            self._publish_prompts(prompts, token_ids, ids, stamps)

    def _publish_prompts(
        self,
        prompts: Sequence[tuple[int, CacheUser, int, int]],
        token_ids: np.ndarray,
        ids: np.ndarray,
        stamps: np.ndarray,
    ) -> None:
        """Caches whole prompts of which one hash is known: rows, their requests, and where theirs are in `ids`."""
        firsts = ids[[begin for _, _, begin, _ in prompts]]
        are_new = self._pool.name(firsts, [user.block_hashes[0] for _, user, _, _ in prompts])
        for (row, user, begin, end), is_new in zip(prompts, are_new, strict=True):
            self._go_on(row, user, token_ids, 1, ids[begin + 1 : end], stamps[begin + 1 : end], is_new)

    def _publish(
        self, row: int, user: CacheUser, token_ids: np.ndarray, begin: int, ids: np.ndarray, stamps: np.ndarray
    ) -> None:
        """Caches the row's blocks from number `begin` on."""
        tail = self._of_row.get(row)
        if tail is not None and self._tails.get(tail.parent) is tail:
            tail.append(ids, stamps)
            return
        hashes = user.block_hashes
        self._hasher.extend(hashes, token_ids[row], begin + 1, user.extra_keys)
        num_named = min(len(hashes) - begin, len(ids))
        is_new = self._name(hashes, begin, ids[:num_named])
        self._go_on(row, user, token_ids, begin + num_named, ids[num_named:], stamps[num_named:], is_new)

    def _go_on(
        self,
        row: int,
        user: CacheUser,
        token_ids: np.ndarray,
        begin: int,
        ids: np.ndarray,
        stamps: np.ndarray,
        is_new: bool,
    ) -> None:
        """Caches the blocks after those that have just got their hashes; is_new: whether no other block had these."""
        if not len(ids):
            return
        if is_new:
            tail = Tail(user.block_hashes, user.extra_keys, begin, ids, stamps)
            self._of_row[row] = self._tails[tail.parent] = tail
        else:  # another row has computed the same, and may have gone on likewise
            self._hasher.extend(user.block_hashes, token_ids[row], begin + len(ids), user.extra_keys)
            self._name(user.block_hashes, begin, ids)

    def find(self, hashes: list[bytes], lookup: Callable[[list[bytes]], np.ndarray]) -> np.ndarray:
        """`lookup` of a request's first hashes in the pool, where blocks of tails get their hashes."""
        ids = lookup(hashes)
        while 0 < len(ids) < len(hashes) and self._give_hashes(hashes[len(ids) - 1]):
            ids = np.concatenate((ids, lookup(hashes[len(ids) :])))
        return ids

    def stop(self, rows: np.ndarray) -> None:
        """These rows publish no more."""
        for row in rows.tolist():
            self._of_row.pop(row, None)

    def _name(self, hashes: list[bytes], begin: int, ids: np.ndarray) -> bool:
        """Caches blocks by their hashes, except where another block has them; whether none has."""
        end = begin + len(ids)
        parents = hashes[max(begin - 1, 0) : end - 1]
        if not self._tails.keys().isdisjoint(parents):
            for parent in parents:
                self._give_hashes(parent)
        return all(self._pool.name(ids, hashes[begin:end]))

    def _give_hashes(self, parent: bytes) -> bool:
        """Whether there was a tail after the block of this hash; its blocks have hashes from now on."""
        tail = self._tails.pop(parent, None)
        if tail is None:
            return False
        is_cached = self._pool.stamps[tail.ids] == tail.stamps
        ids = tail.ids[: int(np.count_nonzero(is_cached))]
        assert is_cached[: len(ids)].all(), "a tail is evicted from its end"
        num_known = len(tail.hashes) - tail.begin
        if num_known < len(ids):
            self._hasher.append(tail.hashes, block_bytes(self._tokens_of(ids[num_known:])), tail.extra_keys)
        self._pool.name(ids, tail.hashes[tail.begin : tail.begin + len(ids)])
        return True

    def _forget(self, hashes: Iterable[bytes]) -> None:
        deque(map(self._tails.pop, hashes, repeat(None)), maxlen=0)

    def check(self) -> None:
        """Asserts the invariant."""
        in_tails: list[int] = []
        for parent, tail in self._tails.items():
            assert parent == tail.parent == tail.hashes[tail.begin - 1], "a tail has another parent"
            assert parent in self._pool.hashes(0), "the parent of a tail is evicted"
            in_tails += tail.ids[self._pool.stamps[tail.ids] == tail.stamps].tolist()
        assert sorted(in_tails) == np.flatnonzero(self._pool.stamps >= 0).tolist(), "stamps and tails disagree"
