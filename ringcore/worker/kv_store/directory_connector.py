"""A store of two levels: host memory, and behind it a directory with a file a block, which later engines find.

    save:  blocks ──copies──▶ host memory ──a thread──▶ files
    load:  files ──threads──▶ host memory ──copies──▶ blocks

Writes go through: a block in memory has its file soon, so that making room in memory waits for no disk, and what was
saved survives the engine. A block that is read from a file stays in memory, the most recently used one.

Threads read and write files and do nothing else; copies are started, and found to have ended, by the thread that
launches the steps. What finds no place in memory is not saved: a step never waits for a disk. If the directory hangs,
memory remains.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ringcore.protocol.stored_kv import LevelCounts
from ringcore.worker.kv_store.block_file import Found
from ringcore.worker.kv_store.block_files import BlockFiles
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.kv_store.host_cache import CachedBlock, HostCache
from ringcore.worker.memory.block_link import BlockLink

__all__ = ["DirectoryConnector"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    names: list[bytes]
    block_ids: list[int]
    deadline_s: float  # monotonic; what no thread has begun to read by then counts as missing
    is_loaded: list[bool]
    num_left: int


@dataclass(slots=True)
class _Part:
    """One block of a load."""

    load: _Load
    index: int

    @property
    def name(self) -> bytes:
        return self.load.names[self.index]

    def end(self, is_loaded: bool) -> None:
        self.load.is_loaded[self.index] = is_loaded
        self.load.num_left -= 1


class DirectoryConnector(KVConnector):
    """files: of this rank, and of the blocks' layout. timeout_s: of a load's blocks that wait to be read.

    Invariant: a block of the cache has a user for each entry of `_copying_out`, `_writing`, `_reading` and
    `_copying_in` that has it.
    """

    def __init__(self, link: BlockLink, places: HostBlocks, files: BlockFiles, timeout_s: float) -> None:
        self._link, self._files, self._timeout_s = link, files, timeout_s
        self._num_for_loads = places.num_free // 4  # places that saves leave available
        self._max_reading = max(1, places.num_free // 2)  # a large load leaves some of what is in memory
        self._cache = HostCache(places)
        self._copying_out: deque[tuple[Any, list[CachedBlock]]] = deque()  # a token, and what it copies
        self._writing: deque[tuple[CachedBlock, Future[None]]] = deque()
        self._unread: deque[_Part] = deque()
        self._reading: list[tuple[_Part | None, CachedBlock, Future[Found]]] = []  # None: it was given up
        self._copying_in: deque[tuple[Any, list[tuple[_Part, CachedBlock]]]] = deque()
        self._loads: dict[int, _Load] = {}
        self._num_memory_hits = self._num_directory_hits = 0
        self._num_unwritten = self._num_broken = 0

    def held(self) -> list[bytes]:
        return self._files.found

    def drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._cache.drop(name)
        self._files.remove(names)

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self._progress()
        count = min(len(names), max(self._cache.num_available - self._num_for_loads, 0))
        self._num_unwritten += len(names) - count
        if not count:
            return
        blocks = [self._cache.add(name) for name in names[:count]]
        token = self._link.save(block_ids[:count], [block.contents for block in blocks])
        for block in blocks:
            block.is_whole = True
        self._copying_out.append((token, blocks))
        self._progress()

    def load(self, number: int, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        load = _Load(list(names), list(block_ids), deadline_s, [False] * len(names), len(names))
        self._loads[number] = load
        found: list[tuple[_Part, CachedBlock]] = []
        for part in (_Part(load, index) for index in range(len(names))):
            block = self._cache.find(part.name)
            if block is not None and block.is_whole:
                self._cache.hold(block)
                found.append((part, block))
            else:
                self._unread.append(part)
        if found:
            self._num_memory_hits += len(found)
            self._copy_in(found)
            self._files.touch([part.name for part, _ in found])
        self._progress()

    def result(self, number: int) -> list[bool] | None:
        self._progress()
        load = self._loads.get(number)
        return load.is_loaded if load is not None and not load.num_left else None

    def forget_results(self, before: int) -> None:
        for number in [number for number in self._loads if number < before]:
            del self._loads[number]

    def counts(self) -> LevelCounts:
        size = self._link.pages.block_bytes
        return LevelCounts(
            memory_loaded_bytes=self._num_memory_hits * size,
            directory_loaded_bytes=self._num_directory_hits * size,
            num_unwritten_blocks=self._num_unwritten,
            num_broken_files=self._num_broken,
            num_lost_directories=int(self._files.is_lost),
        )

    # -----------------------------------------------------------------------------------------------------------
    # Everything that is in progress goes on as far as it can without waiting.

    def _progress(self) -> None:
        if not self._files.is_lost and not self._files.check():
            self._give_up()
        self._write_copied()
        self._end_written()
        self._end_loaded()
        self._end_read()
        self._read_next()

    def _write_copied(self) -> None:
        while self._copying_out and self._link.is_done(self._copying_out[0][0]):
            for block in self._copying_out.popleft()[1]:
                if block.is_dropped or self._files.is_lost:
                    self._num_unwritten += not block.is_dropped
                    self._cache.release(block)
                else:
                    self._writing.append((block, self._files.write(block.name, block.view)))

    def _end_written(self) -> None:
        while self._writing and self._writing[0][1].done():
            block, future = self._writing.popleft()
            self._cache.release(block)
            if future.cancelled():
                self._num_unwritten += 1
            elif (error := future.exception()) is not None:
                if not self._num_unwritten:
                    _log.warning("blocks of the KV cache cannot be kept in a file: %s", error)
                self._num_unwritten += 1

    def _read_next(self) -> None:
        """Reads into available places. What another load has brought into memory meanwhile is not read."""
        now_s = time.monotonic()
        while self._unread:
            part = self._unread[0]
            block = self._cache.find(part.name)
            if self._files.is_lost or now_s > part.load.deadline_s:
                part.end(False)
            elif block is not None and block.is_whole:
                self._cache.hold(block)
                self._num_memory_hits += 1
                self._copy_in([(part, block)])
            elif block is not None or not self._cache.num_available or len(self._reading) >= self._max_reading:
                return
            else:
                block = self._cache.add(part.name)
                self._reading.append((part, block, self._files.read(part.name, block.view)))
            self._unread.popleft()

    def _end_read(self) -> None:
        now_s = time.monotonic()
        reading, good = [], []
        for part, block, future in self._reading:
            is_late = part is not None and now_s > part.load.deadline_s
            if not future.done() and not (is_late and future.cancel()):
                reading.append((part, block, future))
                continue
            found = "missing" if future.cancelled() else future.result()
            self._num_broken += found == "broken"
            if found == "whole" and part is not None:
                block.is_whole = True
                good.append((part, block))
                continue
            self._forget(block)
            self._cache.release(block)
            if part is not None:
                part.end(False)
        self._reading = reading
        if good:
            self._num_directory_hits += len(good)
            self._copy_in(good)

    def _forget(self, block: CachedBlock) -> None:
        if not block.is_dropped:
            self._cache.drop(block.name)

    def _copy_in(self, parts: list[tuple[_Part, CachedBlock]]) -> None:
        block_ids = [part.load.block_ids[part.index] for part, _ in parts]
        self._copying_in.append((self._link.load([block.contents for _, block in parts], block_ids), parts))

    def _end_loaded(self) -> None:
        while self._copying_in and self._link.is_done(self._copying_in[0][0]):
            for part, block in self._copying_in.popleft()[1]:
                part.end(True)
                self._cache.release(block)

    def _give_up(self) -> None:
        """The directory hangs: no load waits for it. The place that a hung thread has stays its own until it ends."""
        for index, (part, block, future) in enumerate(self._reading):
            if part is not None and not future.done():
                part.end(False)
                self._forget(block)
                self._reading[index] = None, block, future
        self._writing = deque(sorted(self._writing, key=lambda one: not one[1].done()))  # the hung one is the last

    def close(self) -> None:
        self._link.finish()
        self._write_copied()
        self._files.close()
        self._end_written()
        if self._num_unwritten:
            _log.info("%d blocks of the KV cache were not kept: the disk was slower, or failed", self._num_unwritten)
            self._num_unwritten = 0
        self._cache.close()
