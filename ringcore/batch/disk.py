"""Writes to files so that a crash, a power cut or a full disk leaves either all of a write or none that counts."""

from __future__ import annotations

import os
from contextlib import suppress

from ringcore.errors import RingcoreError

__all__ = ["append", "cannot_write", "replace_file", "sync_folder"]


def append(fd: int, data: bytes, end: int, path: str) -> int:
    """Writes `data` at `end`, the end of the file, with one call unless the system takes less; returns the new end.
    Raises `RingcoreError` where it cannot be written whole, and then cuts what was."""
    try:
        written = os.pwrite(fd, data, end)
        while written < len(data):  # a full disk takes a part, and refuses the next call with the reason
            written += os.pwrite(fd, data[written:], end + written)
    except OSError as error:
        with suppress(OSError):  # the journal tells anyway where the file's end is
            os.ftruncate(fd, end)
        raise cannot_write(path, error) from error
    return end + len(data)


def replace_file(path: str, data: bytes, *, is_synced: bool = True) -> None:
    """Makes a file, or replaces it, at once: a reader sees the old content or the new. Raises `RingcoreError`."""
    made = f"{path}.{os.getpid()}.tmp"
    try:
        with open(made, "wb") as file:
            file.write(data)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(made, path)
        if is_synced:
            sync_folder(path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(made)
        raise cannot_write(path, error) from error


def sync_folder(path: str) -> None:
    """Makes the name of a new file last."""
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cannot_write(path: str, error: OSError) -> RingcoreError:
    remedy = "make room, or mend it, and run again with --resume: what is done is kept"
    return RingcoreError(f"{path}: cannot be written: {error.strerror}; {remedy}", path=path, errno=error.errno)
