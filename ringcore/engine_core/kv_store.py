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

    ranks: the KV cache of each, with the layers of its stage alone. All have memory for the same number of blocks, that
    of the rank with the largest ones; a directory behind it has room for as many as `directory_bytes` of all ranks.
    """
    cache = config.cache
    if cache.host_kv_cache_bytes is None:
        return OpenedStore(None, None)
    block_bytes = [rank.block_bytes for rank in ranks]
    largest, of_all = max(block_bytes), sum(block_bytes)
    num_blocks = _count("host_kv_cache_bytes", cache.host_kv_cache_bytes, largest, "on a rank")
    capacity, hasher, namespace = num_blocks, None, b""
    if cache.host_kv_cache_dir is not None:
        namespace = _namespace(config, ranks)
        limit = cache.directory_bytes(len(ranks))
        capacity = max(capacity, _count("host_kv_cache_dir_bytes", limit, of_all, "on all ranks"))
        hasher = BlockHasher(min(group.spec.block_size for group in ranks[0].groups), root=namespace)
    answers = executor.collective_rpc("open_kv_store", (namespace.hex(), num_blocks))
    held = msgspec.convert(answers, list[list[bytes]])
    on_all = set(held[0]).intersection(*held[1:])
    stored = [name for name in held[0] if name in on_all]  # the oldest first
    store = BlockStore(capacity, of_all, stored, outlives_engine=hasher is not None)
    return OpenedStore(hasher, store)


def _count(option: str, num_bytes: int, block_bytes: int, where: str) -> int:
    if num_bytes < block_bytes:
        raise CapacityError(
            f"{option}={num_bytes}: one block of the KV cache has {format_bytes(block_bytes, exact=True)} {where}; "
            "give more",
            needed_bytes=block_bytes,
            available_bytes=num_bytes,
        )
    return num_bytes // block_bytes


def _namespace(config: EngineConfig, ranks: Sequence[KVCacheConfig]) -> bytes:
    """What the contents of a block depend on besides its tokens, the request's own keys and the layout of its page."""
    layout, head = config.parallel.layout, config.model.draft_head
    parts = {
        "format": 2,
        "version": __version__,  # another one may compute a layer in another way
        "model": model_fingerprint(config.model.files, config.model.seed),
        "implementation": config.model.model_impl,
        "draft_head": None if head is None else model_fingerprint(head.files, config.model.seed),
        "quantization": config.model.spec.quantization,
        "groups": [rank.groups for rank in ranks],  # of each rank: layers, heads, sizes, dtypes, windows
        "stages": layout.num_stages,
        "ranks": layout.ranks_per_stage,
    }
    return blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()
