"""Opens the stores of KV beyond the device: one a rank, and the books over all of them."""

from __future__ import annotations

from collections.abc import Sequence
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
from ringcore.version import __version__

__all__ = ["OpenedStore", "open_store"]


class OpenedStore(NamedTuple):
    hasher: BlockHasher | None  # None: the names need not be those of another process
    store: BlockStore | None


def open_store(config: EngineConfig, executor: Executor, ranks: Sequence[KVCacheConfig]) -> OpenedStore:
    """Has every rank open its store, if the options ask for one. Raises `CapacityError` and what a worker raises.

    ranks: the KV cache of each, with the layers of its stage alone. All hold the same blocks, as many as the rank with
    the largest ones has room for.
    """
    cache = config.cache
    if cache.host_kv_cache_bytes is None:
        return OpenedStore(None, None)
    block_bytes = [rank.block_bytes for rank in ranks]
    largest = max(block_bytes)
    num_blocks = cache.host_kv_cache_bytes // largest
    if not num_blocks:
        raise CapacityError(
            f"host_kv_cache_bytes={cache.host_kv_cache_bytes}: one block of the KV cache has "
            f"{format_bytes(largest, exact=True)} on rank {block_bytes.index(largest)}; give more",
            needed_bytes=largest,
            available_bytes=cache.host_kv_cache_bytes,
        )
    hasher, namespace = None, b""
    if cache.host_kv_cache_dir is not None:
        namespace = _namespace(config, ranks)
        hasher = BlockHasher(min(group.spec.block_size for group in ranks[0].groups), root=namespace)
    answers = executor.collective_rpc("open_kv_store", (namespace.hex(), num_blocks))
    held = msgspec.convert(answers, list[list[bytes]])
    on_all = set(held[0]).intersection(*held[1:])
    stored = [name for name in held[0] if name in on_all]  # the oldest first
    store = BlockStore(num_blocks, sum(block_bytes), stored, outlives_engine=hasher is not None)
    return OpenedStore(hasher, store)


def _namespace(config: EngineConfig, ranks: Sequence[KVCacheConfig]) -> bytes:
    """What the contents of a block depend on besides its tokens, the request's own keys and the layout of its page."""
    layout = config.parallel.layout
    parts = {
        "format": 2,
        "version": __version__,  # another one may compute a layer in another way
        "model": model_fingerprint(config.model.files, config.model.seed),
        "implementation": config.model.model_impl,
        "groups": [rank.groups for rank in ranks],  # of each rank: layers, heads, sizes, dtypes, windows
        "stages": layout.num_stages,
        "ranks": layout.ranks_per_stage,
    }
    return blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()
