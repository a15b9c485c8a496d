"""A store in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringcore.protocol.stored_kv import LevelCounts
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.memory.block_link import BlockLink

__all__ = ["MemoryConnector"]


class MemoryConnector(KVConnector):
    """A place of `places` for each block. A place that is dropped may be written at once: saves are in order, and the
    engine drops nothing that it loads."""

    def __init__(self, link: BlockLink, places: HostBlocks) -> None:
        self._link, self._places = link, places
        self._place_of: dict[bytes, int] = {}
        self._num_loaded = 0
        self._loads: dict[int, tuple[Any, list[bool]]] = {}  # a token, None where nothing is copied; and the result

    def held(self) -> list[bytes]:
        return []

    def drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            place = self._place_of.pop(name, None)
            if place is not None:
                self._places.give_back(place)

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        taken = [self._places.take() for _ in names]
        self._place_of.update(zip(names, taken, strict=True))
        self._link.save(block_ids, [self._places[place] for place in taken])

    def load(self, number: int, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        places = [self._place_of.get(name) for name in names]
        found = [(self._places[place], id_) for place, id_ in zip(places, block_ids, strict=True) if place is not None]
        self._num_loaded += len(found)
        token = self._link.load(*zip(*found, strict=True)) if found else None
        self._loads[number] = token, [place is not None for place in places]

    def result(self, number: int) -> list[bool] | None:
        if number not in self._loads:
            return None
        token, is_loaded = self._loads[number]
        return is_loaded if token is None or self._link.is_done(token) else None

    def forget_results(self, before: int) -> None:
        for number in [number for number in self._loads if number < before]:
            del self._loads[number]

    def counts(self) -> LevelCounts:
        return LevelCounts(memory_loaded_bytes=self._num_loaded * self._link.pages.block_bytes)

    def close(self) -> None:
        self._link.finish()
        self._places.close()
