"""ringcore's own block hasher and KVCacheManager, as its scheduler calls them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.prefix_loops import BLOCK_SIZE, PrefixChild, run
from ringcore.kv_cache.block_hash import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup

SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype="float32")
ROW = 0  # one request at a time


class CacheUser:
    """What the cache knows of a request."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.tokens = prompt
        self.extra_keys: ExtraKeys = NO_EXTRA_KEYS
        self.block_hashes: list[bytes] = []


class RingcorePrefixCache(PrefixChild):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "numpy")

    def load(self) -> None:
        self._hasher = BlockHasher(BLOCK_SIZE)
        self._rows = np.array([ROW])

    def start(self, num_blocks: int, max_model_len: int) -> None:
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,
            groups=[KVCacheGroup(["layer"], SPEC)],
            max_model_len=max_model_len,
            max_tokens_in_flight=max_model_len,
        )
        self._manager = KVCacheManager(config, max_num_seqs=1, hasher=self._hasher)

    def request(self, prompt: np.ndarray) -> CacheUser:
        return CacheUser(prompt)

    def forget_hashes(self, request: Any) -> None:
        request.block_hashes.clear()

    def hash(self, request: Any) -> int:
        self._hasher.extend(request.block_hashes, request.tokens, len(request.tokens) // BLOCK_SIZE)
        return len(request.block_hashes)

    def lookup(self, request: Any) -> int:
        return self._manager.find_cached_prefix(request).num_computed_tokens

    def take(self, request: Any) -> None:
        num_tokens = len(request.tokens)
        if not self._manager.reserve(ROW, request, num_tokens, num_tokens, self._manager.no_prefix()):
            raise RuntimeError(f"no blocks for {num_tokens} tokens")
        self._manager.allocate_reserved()
        token_ids = request.tokens.reshape(1, num_tokens)
        self._manager.publish(self._rows, token_ids, np.array([num_tokens]))

    def free(self, request: Any) -> None:
        self._manager.free_rows(self._rows)

    def reset(self) -> None:
        if not self._manager.reset_prefix_cache():
            raise RuntimeError("blocks are in use")


if __name__ == "__main__":
    run(RingcorePrefixCache())
