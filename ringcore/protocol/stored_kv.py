"""KV beyond the device: what a step has the workers copy, and what came of it."""

from __future__ import annotations

import msgspec
import numpy as np

__all__ = ["KVLoad", "KVTransfers", "LevelCounts", "LoadReport", "StoredKVStats"]


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


class LevelCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one rank's loads and saves since its start, by level: host memory, and the directory behind it."""

    memory_loaded_bytes: int = 0
    directory_loaded_bytes: int = 0
    num_unwritten_blocks: int = 0  # saved and not in the directory: no room before the disk, or it failed
    num_broken_files: int = 0  # short, changed or another's; their blocks were computed again
    num_lost_directories: int = 0  # 1: it did not answer in time, and is out of use

    def __add__(self, other: LevelCounts) -> LevelCounts:
        """Of both ranks."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return LevelCounts(**dict(zip(self.__struct_fields__, map(sum, pairs), strict=True)))


class LoadReport(msgspec.Struct, frozen=True):
    """What one rank says of loads in flight."""

    results: list[list[bool] | None]  # by load: which of its blocks were loaded; None while it is in progress
    levels: LevelCounts


class StoredKVStats(msgspec.Struct, frozen=True):
    """Counted since the start, or since the workers were replaced; bytes are of all ranks."""

    num_blocks: int  # stored now
    num_hit_tokens: int  # of prompts, found in the store and loaded
    num_failed_blocks: int  # that a rank could not load; they were computed again
    saved_bytes: int
    loaded_bytes: int
    load_s: float  # from the decision to load to its report, summed
    levels: LevelCounts = LevelCounts()  # of all ranks, as of the last report of a load
