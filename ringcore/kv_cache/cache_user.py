"""What the KV cache reads and writes of a request."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ringcore.kv_cache.block_hash import ExtraKeys

__all__ = ["CacheUser"]


class CacheUser(Protocol):
    """A request, waiting or running; the cache appends to `block_hashes`."""

    tokens: np.ndarray  # [n] int32: the tokens known when it starts
    extra_keys: ExtraKeys
    block_hashes: list[bytes]  # of its first full blocks of the smallest block size, computed on demand
