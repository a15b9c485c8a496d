"""A store in a directory: a file a block, which later engines find.

    save:  blocks ──copies──▶ buffers ──a thread──▶ files
    load:  files ──threads──▶ buffers ──copies──▶ blocks

Threads read and write files and do nothing else; copies are started, and found to have ended, by the thread that
launches the steps. What finds no free buffer is not saved: a step never waits for a disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcore.worker.kv_store.block_file import HEADER_BYTES, read_block, write_block
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.memory.block_link import BlockLink

__all__ = ["DirectoryConnector"]

_log = logging.getLogger(__name__)

_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_NUM_READERS = 4  # a digest takes a core 1 s for a GB


@dataclass(slots=True)
class _Save:
    name: bytes
    buffer: int
    token: Any  # of the copy to the buffer
    is_dropped: bool = False


@dataclass(slots=True)
class _Load:
    names: list[bytes]
    block_ids: list[int]
    is_loaded: list[bool] = field(default_factory=list)
    num_left: int = 0


class DirectoryConnector(KVConnector):
    """folder: of this rank, and of the blocks' layout. buffers: of host memory.

    Invariant: a buffer is free, or of one entry of `_copying_out`, `_writing`, `_reading` or `_copying_in`.
    """

    def __init__(self, folder: Path, link: BlockLink, buffers: HostBlocks) -> None:
        """Raises OSError if the folder cannot be made."""
        self._folder, self._link, self._buffers = folder, link, buffers
        self._num_for_loads = max(1, buffers.num_free // 4)  # buffers that saves leave free
        self._num_written = self._num_skipped = self._num_failed = 0
        self._copying_out: deque[_Save] = deque()
        self._writing: deque[tuple[_Save, Future[None]]] = deque()
        self._unread: deque[tuple[_Load, int]] = deque()  # and the block's index in the load
        self._reading: list[tuple[_Load, int, int, Future[bool]]] = []  # and the buffer
        self._copying_in: deque[tuple[Any, list[tuple[_Load, int, int]]]] = deque()
        self._loads: dict[int, _Load] = {}
        self._writer = ThreadPoolExecutor(1, "kv writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kv reader")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def held(self) -> list[bytes]:
        """Removes what writers that died have left."""
        found, size = [], HEADER_BYTES + self._link.pages.block_bytes
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError):  # another engine has removed it; or it is no block
                    if entry.name.endswith(_TEMPORARY):
                        os.unlink(entry.path)
                    elif entry.name.endswith(_SUFFIX) and entry.stat(follow_symlinks=False).st_size == size:
                        name = bytes.fromhex(entry.name.removesuffix(_SUFFIX))
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, name))
        return [name for _, name in sorted(found)]

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{_SUFFIX}"

    def drop(self, names: Sequence[bytes]) -> None:
        dropped = set(names)
        for save in self._copying_out:
            save.is_dropped = save.is_dropped or save.name in dropped
        for name in names:
            self._writer.submit(self._path(name).unlink, missing_ok=True)

    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self._progress()
        count = min(len(names), max(self._buffers.num_free - self._num_for_loads, 0))
        self._num_skipped += len(names) - count
        if not count:
            return
        taken = [self._buffers.take() for _ in range(count)]
        token = self._link.save(block_ids[:count], [self._buffers[buffer] for buffer in taken])
        self._copying_out += [_Save(name, buffer, token) for name, buffer in zip(names, taken, strict=False)]
        self._progress()

    def load(self, number: int, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        load = _Load(list(names), list(block_ids), [False] * len(names), len(names))
        self._loads[number] = load
        self._unread += [(load, index) for index in range(len(names))]
        self._progress()

    def result(self, number: int) -> list[bool] | None:
        self._progress()
        load = self._loads.get(number)
        return load.is_loaded if load is not None and not load.num_left else None

    def forget_results(self, before: int) -> None:
        for number in [number for number in self._loads if number < before]:
            del self._loads[number]

    # -----------------------------------------------------------------------------------------------------------
    # Everything that is in progress goes on as far as it can without waiting.

    def _progress(self) -> None:
        self._write_copied()
        self._free_written()
        self._free_loaded()
        self._copy_read()
        self._read_next()

    def _write_copied(self) -> None:
        while self._copying_out and self._link.is_done(self._copying_out[0].token):
            save = self._copying_out.popleft()
            if save.is_dropped:
                self._buffers.give_back(save.buffer)
            else:
                self._writing.append((save, self._writer.submit(self._write, save)))

    def _write(self, save: _Save) -> None:
        self._num_written += 1
        temporary = self._folder / f"{os.getpid()}-{self._num_written}{_TEMPORARY}"
        contents = memoryview(self._buffers[save.buffer].numpy())  # type: ignore[arg-type]
        write_block(self._path(save.name), temporary, save.name, contents)

    def _free_written(self) -> None:
        while self._writing and self._writing[0][1].done():
            save, future = self._writing.popleft()
            self._buffers.give_back(save.buffer)
            if (error := future.exception()) is not None:
                if not self._num_failed:
                    _log.warning("blocks of the KV cache cannot be kept in %s: %s", self._folder, error)
                self._num_failed += 1

    def _read_next(self) -> None:
        """Reads into free buffers. A block whose save is in progress is read after it."""
        unwritten = {save.name for save in self._copying_out} | {save.name for save, _ in self._writing}
        while self._unread and self._buffers.num_free:
            load, index = self._unread[0]
            name = load.names[index]
            if name in unwritten:
                return
            self._unread.popleft()
            buffer = self._buffers.take()
            out = memoryview(self._buffers[buffer].numpy())  # type: ignore[arg-type]
            self._reading.append((load, index, buffer, self._readers.submit(read_block, self._path(name), name, out)))

    def _copy_read(self) -> None:
        reading, good = [], []
        for load, index, buffer, future in self._reading:
            if not future.done():
                reading.append((load, index, buffer, future))
            elif future.result():
                good.append((load, index, buffer))
            else:
                self._buffers.give_back(buffer)
                load.num_left -= 1
        self._reading = reading
        if good:
            places = [self._buffers[buffer] for _, _, buffer in good]
            token = self._link.load(places, [load.block_ids[index] for load, index, _ in good])
            self._copying_in.append((token, good))

    def _free_loaded(self) -> None:
        while self._copying_in and self._link.is_done(self._copying_in[0][0]):
            for load, index, buffer in self._copying_in.popleft()[1]:
                load.is_loaded[index] = True
                load.num_left -= 1
                self._buffers.give_back(buffer)

    def close(self) -> None:
        self._link.finish()
        self._write_copied()
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        if self._num_skipped or self._num_failed:
            counts = self._num_skipped, self._num_failed
            _log.info("%d blocks of the KV cache were not kept as the disk was slower, and %d that failed", *counts)
            self._num_skipped = self._num_failed = 0
        self._buffers.close()
