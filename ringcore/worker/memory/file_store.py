"""A host store in a file, for hosts without memory for the weights during sleep."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import IO, Any

import torch

from ringcore.errors import CapacityError, ConfigError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.host_link import HostLink
from ringcore.worker.memory.host_memory import HugePages
from ringcore.worker.memory.host_store import HostStore

__all__ = ["FileStore"]

_PIECE_BYTES = 8 << 20  # per read or write
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStore(HostStore):
    """In an unnamed file, double-buffered: one pinned buffer is copied to or from the device while the other is read
    from or written to the file. The file keeps its length, so that the disk space stays reserved for the next sleep."""

    def __init__(self, num_bytes: int, directory: str, link: HostLink) -> None:
        super().__init__(num_bytes)
        self._directory, self._link = directory, link
        self._file: IO[bytes] | None = None
        self._buffers: list[torch.Tensor] = []
        self._copied: list[Any] = [None, None]  # per buffer, the last H2D copy of `restore`; None: finished
        self._turn = 0  # the buffer that `restore` uses next
        self._registered: torch.Tensor | None = None

    def _allocate(self, is_awaited: bool) -> None:
        try:
            file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  it lives as long as this
        except OSError as error:
            raise ConfigError(
                f"sleep_directory={self._directory!r}: no file can be made there: {error.strerror}; give another one",
                option="sleep_directory",
                value=self._directory,
            ) from error
        buffers = HugePages(2 * _PIECE_BYTES).tensor
        try:
            self._link.register(buffers)
        except BaseException:
            file.close()
            raise
        self._file, self._registered = file, buffers
        self._buffers = [buffers[:_PIECE_BYTES], buffers[_PIECE_BYTES:]]

    def _fd(self) -> int:
        assert self._file is not None, "the store is not ready"
        return self._file.fileno()

    def save(self, contents: torch.Tensor) -> None:
        """Synchronous: a disk error must be raised before the contents are discarded."""
        assert len(contents) == self.num_bytes, (len(contents), self.num_bytes)
        fd = self._fd()
        try:
            if self.num_bytes:
                os.posix_fallocate(fd, 0, self.num_bytes)
            self._write_all(fd, contents)
            os.fdatasync(fd)
        except OSError as error:
            self._link.finish()
            os.ftruncate(fd, 0)
            if error.errno not in _DISK_FULL:
                raise
            raise self._capacity_error(error) from error

    def _write_all(self, fd: int, contents: torch.Tensor) -> None:
        pending: tuple[Any, torch.Tensor, int] | None = None  # the D2H copy in flight, its buffer, its file offset
        for index, at in enumerate(range(0, self.num_bytes, _PIECE_BYTES)):
            piece = contents[at : at + _PIECE_BYTES]
            buffer = self._buffers[index % 2][: len(piece)]
            copied = self._link.copy(piece, buffer)
            if pending is not None:
                self._write(fd, *pending)
            pending = copied, buffer, at
        if pending is not None:
            self._write(fd, *pending)

    def _write(self, fd: int, copied: Any, buffer: torch.Tensor, at: int) -> None:
        self._link.wait(copied)
        left = memoryview(buffer.numpy())  # type: ignore[arg-type]
        while left:
            count = os.pwrite(fd, left, at)
            left, at = left[count:], at + count

    def _read(self, fd: int, buffer: torch.Tensor, at: int) -> None:
        left = memoryview(buffer.numpy())  # type: ignore[arg-type]
        while left:
            count = os.preadv(fd, [left], at)
            if not count:
                raise OSError(errno.EIO, f"the file in {self._directory} ends at {at} of {self.num_bytes} bytes")
            left, at = left[count:], at + count

    def restore(self, out: torch.Tensor, at: int) -> None:
        """Returns after the last read; the last two H2D copies may be in flight. Raises OSError where the file is
        shorter than it was written."""
        assert 0 <= at <= at + len(out) <= self.num_bytes, (at, len(out), self.num_bytes)
        fd = self._fd()
        for begin in range(0, len(out), _PIECE_BYTES):
            piece = out[begin : begin + _PIECE_BYTES]
            buffer = self._buffers[self._turn][: len(piece)]
            if self._copied[self._turn] is not None:
                self._link.wait(self._copied[self._turn])
            self._read(fd, buffer, at + begin)
            self._copied[self._turn] = self._link.copy(buffer, piece)
            self._turn = 1 - self._turn

    def finish(self) -> None:
        self._link.finish()
        self._copied = [None, None]

    def drop(self) -> None:
        """A no-op: the file keeps its disk space."""

    def _capacity_error(self, error: OSError) -> CapacityError:
        stat = os.statvfs(self._directory)
        free = stat.f_bavail * stat.f_frsize
        return CapacityError(
            f"sleep_directory={self._directory!r}: {error.strerror}: {format_bytes(self.num_bytes)} of weights have "
            f"to be kept there, {format_bytes(free)} are free; make room, give another directory, or sleep with "
            "level=2",
            needed_bytes=self.num_bytes,
            available_bytes=free,
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        registered, self._registered = self._registered, None
        self._buffers = []
        if registered is not None:
            self._link.finish()
            self._link.unregister(registered)
