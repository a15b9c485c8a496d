"""vLLM's own block hasher and KVCacheManager, as its scheduler calls them."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.prefix_loops import BLOCK_SIZE, PrefixChild, run
from benchmarks.peers.vllm_parts import PACKAGES, block_hasher, kv_cache_config, vllm_request


class VllmPrefixCache(PrefixChild):
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def load(self) -> None:
        from vllm.config import CacheConfig
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request

        self._manager_class, self._request_class = KVCacheManager, Request
        self._hasher = block_hasher(BLOCK_SIZE, CacheConfig().prefix_caching_hash_algo)
        self._ids = count()

    def start(self, num_blocks: int, max_model_len: int) -> None:
        self._manager = self._manager_class(
            kv_cache_config(num_blocks + 1, BLOCK_SIZE),
            max_model_len,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def request(self, prompt: np.ndarray) -> Any:
        arrived = vllm_request(f"request-{next(self._ids)}", prompt.tolist(), 1)
        return self._request_class.from_engine_core_request(arrived, None)

    def forget_hashes(self, request: Any) -> None:
        request.block_hashes.clear()

    def hash(self, request: Any) -> int:
        request.block_hashes.extend(self._hasher(request))
        return len(request.block_hashes)

    def lookup(self, request: Any) -> int:
        found: int = self._manager.get_computed_blocks(request)[1]
        return found

    def take(self, request: Any) -> None:
        if self._manager.allocate_slots(request, request.num_tokens) is None:
            raise RuntimeError(f"no blocks for {request.num_tokens} tokens")

    def free(self, request: Any) -> None:
        self._manager.free(request)

    def reset(self) -> None:
        if not self._manager.reset_prefix_cache():
            raise RuntimeError("blocks are in use")


if __name__ == "__main__":
    run(VllmPrefixCache())
