"""Opens model files: regular files only, and without blocking.

A folder from an untrusted source may contain FIFOs, sockets, devices and links to them: opening a FIFO blocks until a
writer opens it, and reading /dev/zero never ends.
"""

from __future__ import annotations

import io
import os
import stat

from ringcore.errors import ModelLoadError

__all__ = ["check_model_file", "open_model_file", "path_exists", "read_model_file"]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Whether the path exists, even as a dangling symbolic link: opening that reports the error."""
    return os.path.lexists(path)


def check_model_file(path: str | os.PathLike[str]) -> None:
    """Raises `ModelLoadError` unless it is a regular file; for files that a library opens by itself."""
    try:
        _check_kind(os.fspath(path), os.stat(path).st_mode)
    except OSError as error:
        raise _unreadable(os.fspath(path), error) from error


def open_model_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> io.FileIO:
    """The file for reading, unbuffered.

    Raises `ModelLoadError` where it cannot be opened, is not a regular file, or has more than `max_bytes`.
    """
    name = os.fspath(path)
    check_model_file(name)  # opening a socket fails, and opening a device may have side effects
    try:
        # O_NONBLOCK: the file may have been replaced by a FIFO since the check.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _unreadable(name, error) from error
    try:
        status = os.fstat(descriptor)
        _check_kind(name, status.st_mode)
        if max_bytes is not None and status.st_size > max_bytes:
            raise _too_large(name, max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor)


def read_model_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The whole file. Raises `ModelLoadError` as `open_model_file` does."""
    name = os.fspath(path)
    try:
        with io.BufferedReader(open_model_file(path, max_bytes)) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(name, error) from error
    if len(data) > max_bytes:  # it grows, or is a file of /proc, whose size is reported as 0
        raise _too_large(name, max_bytes)
    return data


def _check_kind(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ModelLoadError(f"{name}: is {kind}, a regular file is needed", path=name)


def _unreadable(name: str, error: OSError) -> ModelLoadError:
    return ModelLoadError(f"{name}: cannot be read: {error.strerror}", path=name)


def _too_large(name: str, max_bytes: int) -> ModelLoadError:
    return ModelLoadError(f"{name}: larger than {max_bytes} bytes, which no such file needs", path=name)
