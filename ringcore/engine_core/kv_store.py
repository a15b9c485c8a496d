"""Opens the stores of KV beyond the device: one a rank, and the books over all of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ringcore.checkpoint.fingerprint import model_fingerprint
from ringcore.config import EngineConfig
from ringcore.errors import CapacityError
from ringcore.executor.base import Executor
from ringcore.host.byte_sizes import format_bytes
from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.block_store import BlockStore
from ringcore.kv_cache.spec import KVCacheConfig

__all__ = ["OpenedStore", "open_store"]


class OpenedStore(NamedTuple):
    hasher: BlockHasher | None  # None: the names need not be those of another process
    store: BlockStore | None


def open_store(config: EngineConfig, executor: Executor, plan: KVCacheConfig) -> OpenedStore:
    """Has every rank open its store, if the options ask for one. Raises `CapacityError` and what a worker raises."""
    cache = config.cache
    if cache.host_kv_cache_bytes is None:
        return OpenedStore(None, None)
    num_blocks = cache.host_kv_cache_bytes // plan.block_bytes
    if not num_blocks:
        raise CapacityError(
            f"host_kv_cache_bytes={cache.host_kv_cache_bytes}: one block of the KV cache has "
            f"{format_bytes(plan.block_bytes, exact=True)} on a rank; give more",
            needed_bytes=plan.block_bytes,
            available_bytes=cache.host_kv_cache_bytes,
        )
    hasher, namespace = None, b""
    if cache.host_kv_cache_dir is not None:
        namespace = _namespace(config, plan)
        hasher = BlockHasher(min(group.spec.block_size for group in plan.groups), root=namespace)
    answers = executor.collective_rpc("open_kv_store", (namespace.hex(), num_blocks))
    held = msgspec.convert(answers, list[list[bytes]])
    on_all = set(held[0]).intersection(*held[1:])
    stored = [name for name in held[0] if name in on_all]  # the oldest first
    store = BlockStore(num_blocks, plan.block_bytes * len(held), stored, outlives_engine=hasher is not None)
    return OpenedStore(hasher, store)


def _namespace(config: EngineConfig, plan: KVCacheConfig) -> bytes:
    """What the contents of a block depend on besides its tokens, the request's own keys and the layout of its page."""
    parts = {
        "format": 1,
        "model": model_fingerprint(config.model.files, config.model.seed),
        "implementation": config.model.model_impl,
        "groups": plan.groups,  # layers, heads, sizes, dtypes, windows
        "ranks": config.parallel.layout.world_size,
    }
    return blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()
