"""The books of a store beyond the device's block pool (host memory, or a directory): which blocks it holds, by name.

The engine keeps them alone, and tells all ranks alike what to drop, save and load; no rank looks anything up. A block's
name is the number of its KV cache group and its hash. A block is saved when the pool evicts it, and stays stored when
it is loaded, so that a second eviction costs nothing. The least recently used ones make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["BlockStore", "Transfers", "block_name"]


def block_name(group: int, block_hash: bytes) -> bytes:
    """The name of a block in a store. group: below 256."""
    return bytes((group,)) + block_hash


class Transfers(NamedTuple):
    """What the workers have to do with the next step, in this order."""

    drops: list[bytes]
    saves: dict[bytes, int]  # the block that has the contents
    loads: list[tuple[int, list[bytes], np.ndarray]]  # its number, names, and the blocks that get the contents [n]


class BlockStore:
    """At most `capacity` blocks of `block_bytes` over all ranks. stored: what it holds at the start, oldest first.

    Invariant: a name is either in `_kept`, in LRU order, or in `_loading`, where nothing evicts it.
    """

    def __init__(
        self, capacity: int, block_bytes: int, stored: Iterable[bytes] = (), *, outlives_engine: bool = False
    ) -> None:
        self._capacity, self._block_bytes, self._outlives_engine = capacity, block_bytes, outlives_engine
        self._kept: OrderedDict[bytes, None] = OrderedDict.fromkeys(stored)
        self._loading: dict[bytes, int] = {}  # the number of the load
        self._drops: list[bytes] = []
        self._saves: dict[bytes, int] = {}
        self._loads: list[tuple[int, list[bytes], np.ndarray]] = []
        self.saved_bytes = self.loaded_bytes = 0  # over all ranks, since the start
        self.num_failed_blocks = 0
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._kept) + len(self._loading)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept or name in self._loading

    def load_of(self, name: bytes) -> int | None:
        """The load in flight that brings this block; None where there is none."""
        return self._loading.get(name)

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """The pool has evicted these blocks: their contents hold until the next step."""
        for name, block_id in zip(names, block_ids, strict=True):
            if name in self._kept:
                self._kept.move_to_end(name)
            elif name not in self._loading and self._make_room(1):
                self._kept[name] = None
                self._saves[name] = block_id

    def _make_room(self, count: int) -> bool:
        """Evicts for `count` more; False if loads need what there is."""
        while self._kept and len(self) + count > self._capacity:
            self._drop(self._kept.popitem(last=False)[0])
        return len(self) + count <= self._capacity

    def _drop(self, name: bytes) -> None:
        if self._saves.pop(name, None) is None:  # else no worker has heard of it
            self._drops.append(name)

    def pin(self, number: int, names: Sequence[bytes]) -> None:
        """Begins load `number` of these, which are stored and not loading: nothing evicts them until `unpin`."""
        for name in names:
            del self._kept[name]
            self._loading[name] = number

    def load(self, number: int, names: list[bytes], block_ids: np.ndarray) -> None:
        """Has the workers load what is pinned into these blocks."""
        self._loads.append((number, names, block_ids))

    def unpin(self, number: int, names: Sequence[bytes], is_loaded: Sequence[bool]) -> None:
        """The load has ended. What was not loaded is forgotten."""
        for name, succeeded in zip(names, is_loaded, strict=True):
            if self._loading.get(name) != number:
                continue  # cleared meanwhile
            del self._loading[name]
            if succeeded:
                self._kept[name] = None
                self.loaded_bytes += self._block_bytes
            else:
                self._drop(name)
                self.num_failed_blocks += 1

    def clear(self) -> None:
        """Drops everything. Loads in flight bring nothing any more."""
        for name in [*self._kept, *self._loading]:
            self._drop(name)
        self._kept.clear()
        self._loading.clear()

    def weights_changed(self) -> None:
        """What is stored is of other weights. What outlives this engine stays for those that have them; its names are
        no names of the new weights, so it gets nothing more.
        """
        if not self._outlives_engine:
            self.clear()
            return
        self._saves = {}
        self._kept.clear()
        self._loading.clear()
        self._capacity = 0

    @property
    def has_transfers(self) -> bool:
        return bool(self._drops or self._saves or self._loads)

    def take_transfers(self) -> Transfers | None:
        """What has to go with the next step; None if nothing."""
        if not self.has_transfers:
            return None
        taken = Transfers(self._drops, self._saves, self._loads)
        self.saved_bytes += len(self._saves) * self._block_bytes
        self._drops, self._saves, self._loads = [], {}, []
        return taken

    def check(self) -> None:
        """Asserts the invariant, for tests."""
        assert not self._kept.keys() & self._loading.keys(), "a block is kept and loading"
        assert len(self) <= self._capacity or not self._kept, "more blocks than there is room for"
        assert self._saves.keys() <= {*self._kept, *self._loading}, "a block is saved and not stored"
