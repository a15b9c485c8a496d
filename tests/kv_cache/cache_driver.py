"""A KV cache driven as the scheduler drives one, by rows whose steps are computed and confirmed."""

from __future__ import annotations

import numpy as np

from ringcore.kv_cache.block_hash import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from ringcore.kv_cache.manager import CachedPrefix, KVCacheManager
from ringcore.kv_cache.spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MLASpec,
    SlidingWindowSpec,
)


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def latent(block_size: int = 4) -> MLASpec:
    return MLASpec(block_size=block_size, kv_lora_rank=12, qk_rope_head_dim=4, dtype="float32")


def window(sliding_window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=sliding_window
    )


def chunked(chunk_size: int, block_size: int = 4) -> ChunkedAttentionSpec:
    return ChunkedAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", chunk_size=chunk_size
    )


def cache_config(
    *specs: KVCacheSpec, num_blocks: int = 8, max_model_len: int = 64, max_tokens_in_flight: int = 64
) -> KVCacheConfig:
    groups = [KVCacheGroup(layer_names=[str(index)], spec=spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks, groups, max_model_len, max_tokens_in_flight)


class User:
    """A request, as far as the cache sees one."""

    def __init__(self, tokens, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        self.tokens = np.array(tokens, np.int32)
        self.extra_keys = extra_keys
        self.block_hashes: list[bytes] = []


def start_row(cache: KVCacheManager, row: int, user: User, num_tokens: int, num_now: int, prefix: CachedPrefix) -> bool:
    """A row that starts alone."""
    is_started = cache.reserve(row, user, num_tokens, num_now, prefix)
    cache.allocate_reserved()
    return is_started


class CacheDriver:
    """Rows over a cache; `check()` after every operation."""

    def __init__(self, *specs: KVCacheSpec, max_num_seqs: int = 4, caching: bool = True, **sizes: int) -> None:
        self.config = cache_config(*(specs or (full(),)), **sizes)
        smallest = min(group.spec.block_size for group in self.config.groups)
        self.cache = KVCacheManager(
            self.config, max_num_seqs=max_num_seqs, enable_prefix_caching=caching, hasher=BlockHasher(smallest, seed=1)
        )
        self.token_ids = np.zeros((max_num_seqs, self.config.max_model_len), np.int32)
        self.computed: dict[int, int] = {}
        self.confirmed: dict[int, int] = {}

    def find(self, tokens, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> CachedPrefix:
        return self.cache.find_cached_prefix(User(tokens, extra_keys))

    def start(self, row: int, user: User, num_tokens: int | None = None, num_now: int | None = None) -> bool:
        """Slots for all of the user's tokens, or for `num_tokens`; the first step comes to `num_now` tokens."""
        prefix = self.cache.find_cached_prefix(user)
        num_tokens = len(user.tokens) if num_tokens is None else num_tokens
        num_now = num_tokens if num_now is None else num_now
        if not start_row(self.cache, row, user, num_tokens, num_now, prefix):
            self.check()
            return False
        self.token_ids[row, : len(user.tokens)] = user.tokens
        self.computed[row], self.confirmed[row] = num_now, prefix.num_computed_tokens
        self.check()
        return True

    def extend(self, *num_tokens_by_row: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
        rows, num_tokens = np.array(num_tokens_by_row, np.int64).T
        taken = self.cache.extend(rows, num_tokens)
        self.computed.update(num_tokens_by_row)
        self.check()
        return [(at_rows.tolist(), ids.tolist()) for at_rows, ids in taken]

    def missing(self, *num_tokens_by_row: tuple[int, int]) -> int:
        rows, num_tokens = np.array(num_tokens_by_row, np.int64).T
        return self.cache.blocks_missing(rows, num_tokens)

    def confirm(self, row: int, num_tokens: int | None = None, *, publish: bool = True) -> bool:
        """The row's steps come back, up to `num_tokens` tokens; whether the window let blocks go."""
        self.confirmed[row] = self.computed[row] if num_tokens is None else num_tokens
        if publish:
            self.publish()
        rows, num_confirmed = self._columns()
        released = self.cache.release_window(rows, num_confirmed)
        self.check()
        return released

    def publish(self) -> None:
        rows, num_confirmed = self._columns()
        self.cache.publish(rows, self.token_ids, num_confirmed)
        self.check()

    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([*self.confirmed], np.int64), np.array([*self.confirmed.values()], np.int64)

    def free(self, row: int) -> None:
        self.cache.free_rows(np.array([row]))
        del self.computed[row], self.confirmed[row]
        self.check()

    def run(self, user: User, row: int = 0) -> None:
        """The user computes all of its tokens in one step, and ends."""
        assert self.start(row, user)
        self.confirm(row)
        self.free(row)

    def tables(self, row: int) -> list[list[int]]:
        return [ids.tolist() for ids in self.cache.block_ids(row)]

    def check(self) -> None:
        self.cache.check(self.computed, self.confirmed)
