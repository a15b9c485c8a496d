"""The shared memory of a ring: a memfd, fully allocated, sealed, and mapped by processes that inherit its descriptors.

A memfd has no name: no other process can open it, and it is freed when every process is killed. It is allocated in full
at creation (too little memory is an error then, not a SIGBUS later) and sealed against a change of its size. If the
kernel has no memfd, or a sandbox forbids it, it is a file of mode 0600 in /dev/shm, unlinked as soon as it is open.
Such a file cannot be sealed; all else is the same.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass

from ringcore.errors import CapacityError, RingcoreError

__all__ = [
    "PAGE",
    "RingCorruptError",
    "RingHandle",
    "RingMapping",
    "create_ring",
    "is_sealed",
    "seal",
    "shared_memory",
    "unnamed_file",
]

PAGE = mmap.PAGESIZE
MAGIC, VERSION = 0x52494E47434F5245, 1
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FALLBACK_DIRECTORY = "/dev/shm"
BUSY_S = 0.1

# Words (u64) of the control page that never change; ring_buffer has the others.
W_MAGIC, W_VERSION, W_CAPACITY, W_NUM_READERS = 0, 1, 2, 3


class RingCorruptError(RingcoreError):
    """Shared memory has contents that no ring writer or reader writes. Fatal: the ring is not resynchronised."""


@dataclass(frozen=True)
class RingHandle:
    """The descriptors of one ring. The creator of the handle owns them, and calls `close`.

    memory_fd: the control page and the data. acks_fd: one page a reader. space_fd: an eventfd that wakes the writer.
    wake_fds: the eventfds that wake the readers, by index; a reader's own process has only its own.
    """

    memory_fd: int
    acks_fd: int
    space_fd: int
    wake_fds: dict[int, int]

    def close(self) -> None:
        for fd in (self.memory_fd, self.acks_fd, self.space_fd, *self.wake_fds.values()):
            os.close(fd)


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("ringcore-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


HAS_MEMFD = _has_memfd()


def unnamed_file(name: str) -> int:
    """The descriptor of an empty memfd, reachable only through it and its duplicates. The name is shown in /proc."""
    if HAS_MEMFD:
        fd = os.memfd_create(f"ringcore-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        return fd
    directory = FALLBACK_DIRECTORY if os.path.isdir(FALLBACK_DIRECTORY) else None
    fd, path = tempfile.mkstemp(prefix=f"ringcore-{name}-", dir=directory)  # mode 0600, close-on-exec
    os.unlink(path)
    return fd


def seal(fd: int, seals: int) -> None:
    """Adds `seals` permanently, for every holder, if the memory can be sealed."""
    deadline = time.monotonic() + BUSY_S
    while HAS_MEMFD:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            # The kernel holds a page of it for a moment, for instance to migrate it.
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
            time.sleep(BUSY_S / 100)
        else:
            return


def is_sealed(fd: int, seals: int) -> bool:
    """Whether the memory has these seals; True without memfd, where it cannot be checked."""
    return not HAS_MEMFD or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals


def shared_memory(name: str, num_bytes: int) -> int:
    """An unnamed file of this size with all pages allocated. Raises `CapacityError`."""
    with ExitStack() as undo:
        try:
            fd = unnamed_file(name)
            undo.callback(os.close, fd)
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            raise CapacityError(
                f"no shared memory for {name}: {num_bytes} bytes asked, {error.strerror}; free memory, or raise the "
                "limit on shared memory of this container or on open files",
                needed_bytes=num_bytes,
            ) from error
        undo.pop_all()
        return fd


def create_ring(capacity: int, num_readers: int) -> RingHandle:
    """A ring of `capacity` bytes (a multiple of the page size). Raises `CapacityError` if memory is short."""
    assert capacity > 0
    assert capacity % PAGE == 0
    assert num_readers > 0
    fds: list[int] = []
    try:
        fds.append(shared_memory("ring", PAGE + capacity))
        fds.append(shared_memory("acks", PAGE * num_readers))
        with mmap.mmap(fds[0], PAGE) as page:
            struct.pack_into("<4Q", page, 0, MAGIC, VERSION, capacity, num_readers)
        for fd in fds:
            seal(fd, SEALS)
        fds.extend(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(1 + num_readers))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    memory_fd, acks_fd, space_fd, *wake_fds = fds
    return RingHandle(memory_fd, acks_fd, space_fd, dict(enumerate(wake_fds)))


class RingMapping:
    """A ring's memory mapping in this process; the data is writable only for the writer."""

    def __init__(self, handle: RingHandle, is_writer: bool) -> None:
        if not is_sealed(handle.memory_fd, SEALS):
            raise RingCorruptError("the ring's memory is not sealed against a change of its size")
        size = os.fstat(handle.memory_fd).st_size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writer else 0)
        self.memory = mmap.mmap(handle.memory_fd, size, prot=access)
        view = memoryview(self.memory)
        self.words = view[:PAGE].cast("Q")
        self.data = view[PAGE:]
        self.capacity, self.num_readers = self.words[W_CAPACITY], self.words[W_NUM_READERS]
        if (self.words[W_MAGIC], self.words[W_VERSION], self.capacity) != (MAGIC, VERSION, size - PAGE):
            raise RingCorruptError(f"{size} bytes of shared memory do not begin as a ring of version {VERSION}")
        self.views = [self.words, self.data, view]

    def map_ack(self, handle: RingHandle, index: int, is_reader: bool) -> memoryview:
        """The words of reader `index`'s own page."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_reader else 0)
        words = memoryview(mmap.mmap(handle.acks_fd, PAGE, prot=access, offset=PAGE * index)).cast("Q")
        self.views.append(words)
        return words

    def close(self) -> None:
        for view in self.views:
            view.release()
        try:
            self.memory.close()
        except BufferError:  # a caller still holds a view of a message: its release unmaps the memory
            return
