"""What the KV cache reads and writes of a request."""

from __future__ import annotations

from array import array
from typing import Protocol

from ringcore.kv_cache.block_hash import ExtraKeys

__all__ = ["CacheUser"]


class CacheUser(Protocol):
    """A request, waiting or running; the cache appends to `block_hashes`."""

    tokens: array[int]  # array('i'): the tokens known when it starts; may grow later
    extra_keys: ExtraKeys
    block_hashes: list[bytes]  # of its first full blocks of the smallest block size, computed on demand
