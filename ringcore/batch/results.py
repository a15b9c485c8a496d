"""The results of a job: a file to which they are appended whole, with the journal beside it."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from importlib.util import find_spec

from ringcore.batch.disk import append, cannot_write, sync_folder
from ringcore.batch.job import Compression, Job
from ringcore.batch.journal import DoneLines, Journal
from ringcore.batch.lines import Outcome
from ringcore.errors import ConfigError

__all__ = ["Results", "compression_of"]

_FRAME_BYTES = 1 << 20  # of text; a compressed output is made of frames of about this size


def compression_of(path: str) -> Compression:
    """By the end of the name. Raises `ConfigError` if the library is missing."""
    if path.endswith((".gz", ".gzip")):
        return "gzip"
    if path.endswith((".zst", ".zstd")):
        if find_spec("zstandard") is None:
            raise ConfigError(f"output={path!r}: zstd needs pip install 'ringcore[batch]'", option="output", value=path)
        return "zstd"
    return "none"


class Results:
    """Open results with their journal.

    Uncompressed, a result is in the file when `add` returns. Compressed, results wait for a frame of 1 MiB, or for
    `flush`; a frame is a gzip member or a zstd frame, so that every cut between two leaves a file that can be read.
    """

    def __init__(self, path: str, fd: int, journal: Journal, done: DoneLines) -> None:
        self.path, self.job, self.done = path, journal.job, done
        self._fd, self._journal = fd, journal
        self._compress = _COMPRESSORS[journal.job.compression]
        self._frame_bytes = 0 if journal.job.compression == "none" else _FRAME_BYTES
        self._waiting: list[Outcome] = []
        self._waiting_bytes = 0
        self._synced = done.end

    @classmethod
    def create(cls, path: str, journal_path: str, job: Job) -> Results:
        """New ones. Raises `RingcoreError` if either file exists: results are never written over."""
        journal = Journal.create(journal_path, job)
        return cls._open(path, journal, os.O_CREAT | os.O_EXCL)

    @classmethod
    def resume(cls, path: str, journal: Journal) -> Results:
        """Those of a job that was begun; both files are cut to what is whole."""
        return cls._open(path, journal, os.O_CREAT)

    @classmethod
    def _open(cls, path: str, journal: Journal, flags: int) -> Results:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
            sync_folder(path)
        except OSError as error:
            journal.close()
            raise cannot_write(path, error) from error
        try:
            return cls(path, fd, journal, journal.recover(fd, path))
        except BaseException:
            os.close(fd)
            journal.close()
            raise

    def add(self, outcome: Outcome) -> None:
        """Raises `RingcoreError` if it cannot be written; what was written before stays whole."""
        self._waiting.append(outcome)
        self._waiting_bytes += len(outcome.written)
        if self._waiting_bytes >= self._frame_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the results that wait for a frame."""
        if not self._waiting:
            return
        written = self._compress(b"".join(one.written for one in self._waiting))
        end = append(self._fd, written, self.done.end, self.path)
        self._journal.add([one.record for one in self._waiting], end, zlib.crc32(written))
        self.done.end = end
        for one in self._waiting:
            self.done.count(one.record)
        self._waiting.clear()
        self._waiting_bytes = 0

    @property
    def unsynced_end(self) -> int | None:
        """The end of what has been written and is not known to be on the disk; None if all is."""
        return self.done.end if self.done.end > self._synced else None

    def sync_data(self) -> None:
        """Forces what was written to the disk; may run in another thread, while more is added."""
        try:
            os.fdatasync(self._fd)
            self._journal.sync()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def mark_synced(self, end: int) -> None:
        """After `sync_data`: results up to `end`, of before it, are on the disk."""
        self._synced = end
        self._journal.add_sync(end)

    def sync(self) -> None:
        self.flush()
        end = self.unsynced_end
        if end is not None:
            self.sync_data()
            self.mark_synced(end)

    def close(self) -> None:
        """Does not sync."""
        self._journal.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _zstd(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor().compress(data))


_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "zstd": _zstd,
}
