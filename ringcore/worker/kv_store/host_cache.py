"""Blocks in host memory by name: the level in front of a directory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from ringcore.worker.kv_store.host_blocks import HostBlocks

__all__ = ["CachedBlock", "HostCache"]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block in a place of host memory. Users copy it, read it or write it, and nothing evicts it meanwhile."""

    name: bytes
    place: int
    contents: torch.Tensor  # uint8 [block_bytes]
    num_users: int
    is_whole: bool = False  # a copy that the link orders before all later ones fills it, or it is full
    is_dropped: bool = False  # and no longer found

    @property
    def view(self) -> memoryview:
        return memoryview(self.contents.numpy())  # type: ignore[arg-type]


class HostCache:
    """Blocks over the places of `HostBlocks`; the least recently used one without users makes room.

    Invariant: a place is free, or of one block. A block that is not dropped is in `_blocks`, and in `_idle` exactly if
    it has no users; a dropped one has users.
    """

    def __init__(self, places: HostBlocks) -> None:
        self._places = places
        self._blocks: dict[bytes, CachedBlock] = {}
        self._idle: OrderedDict[bytes, CachedBlock] = OrderedDict()  # the least recently used first

    @property
    def num_available(self) -> int:
        """How many blocks can be added now."""
        return self._places.num_free + len(self._idle)

    def find(self, name: bytes) -> CachedBlock | None:
        return self._blocks.get(name)

    def add(self, name: bytes) -> CachedBlock:
        """A block that is not whole yet, with one user. There is one available."""
        self.drop(name)
        if self._places.num_free:
            place = self._places.take()
        else:
            oldest, evicted = self._idle.popitem(last=False)
            place = evicted.place
            del self._blocks[oldest]
        block = self._blocks[name] = CachedBlock(name, place, self._places[place], 1)
        return block

    def hold(self, block: CachedBlock) -> None:
        """One user more."""
        block.num_users += 1
        self._idle.pop(block.name, None)

    def release(self, block: CachedBlock) -> None:
        """One user less: it was used just now."""
        block.num_users -= 1
        if block.num_users:
            return
        if block.is_dropped:
            self._places.give_back(block.place)
        else:
            self._idle[block.name] = block

    def drop(self, name: bytes) -> None:
        """It is not found any more, whether it was there or not."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        block.is_dropped = True
        if self._idle.pop(name, None) is not None:
            self._places.give_back(block.place)

    def close(self) -> None:
        """Idempotent. No copy may be in progress."""
        self._places.close()

    def check(self) -> None:
        """Asserts the invariant, for tests."""
        assert {name for name, block in self._blocks.items() if not block.num_users} == self._idle.keys()
        assert not any(block.is_dropped for block in self._blocks.values())
        places = [block.place for block in self._blocks.values()]
        assert len(set(places)) == len(places), "two blocks in one place"
