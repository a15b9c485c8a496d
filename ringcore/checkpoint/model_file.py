"""Opens a model's file: a regular one, and without waiting for anything.

A folder that came from elsewhere may hold FIFOs, sockets, devices and links to them: to open a FIFO waits for a writer,
and to read /dev/zero never ends.
"""

from __future__ import annotations

import io
import os
import stat

from ringcore.errors import ModelLoadError

__all__ = ["check_model_file", "is_there", "open_model_file", "read_model_file"]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything of that name, a link that leads nowhere too: opening it tells what is wrong."""
    return os.path.lexists(path)


def check_model_file(path: str | os.PathLike[str]) -> None:
    """Raises `ModelLoadError` where what is there is no regular file; for files that a library opens by itself."""
    try:
        _check_kind(os.fspath(path), os.stat(path).st_mode)
    except OSError as error:
        raise _unreadable(os.fspath(path), error) from error


def open_model_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> io.FileIO:
    """The file for reading, unbuffered.

    Raises `ModelLoadError` where it cannot be opened, is no regular file, or has more than `max_bytes`.
    """
    name = os.fspath(path)
    check_model_file(name)  # a socket cannot be opened at all, and to open a device may already do something
    try:
        # What has taken its place since is not waited for.
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
    """All of it, as one read gives it. Raises `ModelLoadError` as `open_model_file` does."""
    name = os.fspath(path)
    try:
        with io.BufferedReader(open_model_file(path, max_bytes)) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(name, error) from error
    if len(data) > max_bytes:  # one that grows, or a file of /proc, which says that it is empty
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
