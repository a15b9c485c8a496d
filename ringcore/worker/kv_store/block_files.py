"""The blocks of one rank as files in a folder of their own, which later engines find."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from ringcore.worker.kv_store.block_file import HEADER_BYTES, Found, read_block, write_block
from ringcore.worker.kv_store.directory_limit import SUFFIX, TEMPORARY, DirectoryLimit
from ringcore.worker.kv_store.disk_threads import DiskThreads

__all__ = ["BlockFiles"]

_log = logging.getLogger(__name__)

_NUM_READERS = 4  # a digest takes a core 1 s for a GB
_CLOSE_S = 3.0  # an executor ends a worker that takes 5 s


class BlockFiles:
    """Reads, writes and removes files in threads; no method waits for a disk, but the constructor and `close`.

    A function in a thread that takes longer than timeout_s means that the file system hangs: from then on `is_lost`,
    nothing is begun any more, and what has not begun is cancelled. A hung thread may still read or write what it was
    given.

    Writes and removals are done in their order by one thread, so that a removed file stays removed.
    """

    def __init__(self, folder: Path, block_bytes: int, limit: DirectoryLimit, timeout_s: float) -> None:
        """Raises OSError if the folder cannot be made or read, also because it does not answer."""
        self._folder, self._file_bytes = folder, HEADER_BYTES + block_bytes
        self._limit, self._timeout_s = limit, timeout_s
        self._prefix, self._num_written = f"{os.getpid()}-{secrets.token_hex(8)}", 0  # a pid of a container is no name
        self._writers, self._readers = DiskThreads("kv writer", 1), DiskThreads("kv reader", _NUM_READERS)
        self._sweepers = DiskThreads("kv sweeper", 1)  # a sweep may take long, and nothing waits for it
        self.is_lost = False
        try:
            self.found = self._writers.submit(self._open).result(timeout_s)
        except BaseException as error:
            self._end()
            if isinstance(error, futures.TimeoutError):
                raise TimeoutError(errno.ETIMEDOUT, f"no answer for {timeout_s:g} s") from None
            raise
        self._sweep = self._sweepers.submit(self._make_room)

    def _open(self) -> list[bytes]:
        """-> the names of its blocks, the least recently used first."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError, ValueError):  # another engine has removed it; or it is no block
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX) and stat.st_size == self._file_bytes:
                        found.append((stat.st_mtime_ns, bytes.fromhex(entry.name.removesuffix(SUFFIX))))
        return [name for _, name in sorted(found)]

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{SUFFIX}"

    def read(self, name: bytes, out: memoryview) -> Future[Found]:
        """Writes the block into `out`, which must not be used for anything else until the future is done."""
        return self._readers.submit(partial(read_block, self._path(name), name, out))

    def write(self, name: bytes, contents: memoryview) -> Future[None]:
        """Reads `contents`, which must not change until the future is done. It raises OSError."""
        return self._writers.submit(partial(self._write, name, contents))

    def _write(self, name: bytes, contents: memoryview) -> None:
        self._num_written += 1
        temporary = self._folder / f"{self._prefix}-{self._num_written}{TEMPORARY}"
        write_block(self._path(name), temporary, name, contents)
        if self._limit.note(self._file_bytes) and self._sweep.done():
            self._sweep = self._sweepers.submit(self._make_room)

    def _make_room(self) -> None:
        try:
            self._limit.sweep()
        except OSError as error:
            _log.warning("host_kv_cache_dir cannot be kept within host_kv_cache_dir_bytes: %s", error)

    def remove(self, names: Sequence[bytes]) -> None:
        """Whether there are such files or not."""
        for name in names:
            self._writers.submit(partial(self._path(name).unlink, missing_ok=True))

    def touch(self, names: Sequence[bytes]) -> None:
        """These were used, without a read of their files."""
        self._writers.submit(partial(self._touch, list(names)))

    def _touch(self, names: list[bytes]) -> None:
        for name in names:
            with suppress(OSError):
                os.utime(self._path(name))

    def check(self) -> bool:
        """Whether the files answer; if not, nor do they later."""
        if not self.is_lost and max(self._writers.stuck_s(), self._readers.stuck_s()) > self._timeout_s:
            self.is_lost = True
            self._end()
            _log.warning(
                "host_kv_cache_dir: %s has not answered for %g s; it is out of use until the next start, and its "
                "blocks are computed again",
                self._folder,
                self._timeout_s,
            )
        return not self.is_lost

    def _end(self) -> None:
        for threads in (self._writers, self._readers, self._sweepers):
            threads.close()

    def close(self) -> None:
        """Waits for writes, for 3 seconds at most; the others are lost. Idempotent."""
        written = self._writers.submit(lambda: None)
        with suppress(futures.TimeoutError, futures.CancelledError):
            written.result(min(_CLOSE_S, self._timeout_s))
        self._end()
