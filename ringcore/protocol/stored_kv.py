"""KV beyond the device: what a step has the workers copy, and what came of it."""

from __future__ import annotations

import msgspec
import numpy as np

__all__ = ["KVLoad", "KVTransfers", "StoredKVStats"]


class KVLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy the stored blocks with these names into the device's blocks."""

    number: int
    names: list[bytes]
    block_ids: np.ndarray  # [n] int32


class KVTransfers(msgspec.Struct, frozen=True, array_like=True):
    """In the order of the fields. What is saved must be read before the step writes; no row of the step, nor of one
    before the load is reported (`finished_kv_loads`), reads what is loaded."""

    drops: list[bytes]  # names that the store forgets
    save_names: list[bytes]
    save_block_ids: np.ndarray  # [n] int32
    loads: list[KVLoad]


class StoredKVStats(msgspec.Struct, frozen=True):
    """Counted since the start, or since the workers were replaced; bytes are of all ranks."""

    num_blocks: int  # stored now
    num_hit_tokens: int  # of prompts, found in the store and loaded
    num_failed_blocks: int  # that a rank could not load; they were computed again
    saved_bytes: int
    loaded_bytes: int
    load_s: float  # from the decision to load to its report, summed
