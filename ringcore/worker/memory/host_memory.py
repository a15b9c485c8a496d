"""Host memory by Linux system calls: virtual memory management for a CPU's arenas, and huge pages.

See mmap(2), memfd_create(2) and madvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.arena import VirtualMemory

__all__ = ["HostVirtualMemory", "HugePageChunks", "HugePages", "host_view"]

_FIXED, _NORESERVE, _PROT_NONE = 0x10, 0x4000, 0  # of <sys/mman.h>, which Python's mmap does not name
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20  # addresses: pages are allocated on first write
_CHUNK_ALIGNMENT = 256

# Not Python's mmap: it has no MAP_FIXED, and holds the GIL while the kernel clears pages.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostVirtualMemory(VirtualMemory):
    """A CPU's virtual memory. A handle is the file descriptor of a memfd; its pages are zeros, allocated on write."""

    granularity = mmap.PAGESIZE
    waits_to_create: ClassVar[bool] = False  # one check of the free memory covers the whole request

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """free_bytes: host memory available to this process."""
        self._free_bytes = free_bytes

    def reserve(self, num_bytes: int) -> int:
        return _map(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)

    def create(self, num_bytes: int) -> int:
        """Checks the free memory: the kernel overcommits, and the OOM killer would end the process on write."""
        free = self._free_bytes()
        if num_bytes > free:
            raise CapacityError(
                f"host memory: {format_bytes(num_bytes)} asked, {format_bytes(free)} free; lower kv_cache_bytes or "
                "gpu_memory_utilization, or end what else uses this host's memory",
                needed_bytes=num_bytes,
                available_bytes=free,
            )
        file = os.memfd_create("ringcore arena")  # close-on-exec
        try:
            os.ftruncate(file, num_bytes)
        except OSError:
            os.close(file)
            raise
        return file

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        _map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        """Mapped memory is accessible at once."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """One mmap call, not munmap and mmap: in between another thread could be given the addresses."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _map(address, num_bytes, _PROT_NONE, flags, -1)

    def release(self, handle: Any) -> None:
        os.close(handle)

    def free(self, address: int, num_bytes: int) -> None:
        if _libc.munmap(address, num_bytes):
            raise _os_error("munmap")

    def synchronize(self) -> None:
        """A no-op: every operation is synchronous."""


def _map(address: int | None, num_bytes: int, access: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, num_bytes, access, flags, file, 0)
    if found is None or found == _FAILED:
        raise _os_error("mmap")
    return int(found)


def _os_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def host_view(address: int, num_bytes: int, owner: object) -> torch.Tensor:
    """uint8 [num_bytes] over mapped addresses of the host, num_bytes > 0. It keeps `owner` alive."""
    array = (ctypes.c_uint8 * num_bytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


class HugePages:
    """Private memory in huge pages where the kernel has them, freed with the last tensor that views it.

    tensor: uint8 [num_bytes], aligned to 2 MiB; its pages are zeros, allocated on first write.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError where the process has no virtual addresses left."""
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        begin = -whole.data_ptr() % _HUGE_PAGE_BYTES
        self.tensor = whole[begin : begin + num_bytes]
        _advise(self.tensor, mmap.MADV_HUGEPAGE)  # falls back to small pages

    def populate(self, num_threads: int, piece_bytes: int, may_take: Callable[[int], bool]) -> bool:
        """Populates all pages with several threads: a single thread clears them far below memory bandwidth.

        may_take: called before each piece, from any of the threads, with the remaining bytes; False stops all threads.
        An exception of it stops all threads and is raised here. -> whether all pages were populated.
        """
        return _Population(self.tensor, piece_bytes, may_take).run(num_threads)

    def give_back(self) -> None:
        """Returns the pages to the host; the contents are lost."""
        _advise(self.tensor, mmap.MADV_DONTNEED)


class HugePageChunks:
    """Small, long-lived memory in huge pages: reading 4 KiB pages in a row is a fifth slower, or more. Thread-safe.

    Chunks are carved from the front; each is freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)  # the rest of the newest chunk

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """-> uint8 [num_bytes] of zeros at a multiple of 256 bytes. Raises OSError where the process has no virtual
        addresses left."""
        size = -(-num_bytes // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        with self._lock:
            if size > len(self._free):
                self._free = HugePages(max(size, _CHUNK_BYTES)).tensor
            taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken


class _Population:
    """Threads that populate pieces in order, until none is left or one of them fails."""

    def __init__(self, memory: torch.Tensor, piece_bytes: int, may_take: Callable[[int], bool]) -> None:
        self._pieces = [memory[at : at + piece_bytes] for at in range(0, len(memory), piece_bytes)]
        self._may_take = may_take
        self._lock = threading.Lock()
        self._next, self._left = 0, len(memory)
        self._is_stopped = False
        self._error: BaseException | None = None

    def run(self, num_threads: int) -> bool:
        threads = [
            threading.Thread(target=self._work, name="host memory", daemon=True)
            for _ in range(min(num_threads, len(self._pieces)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # terminates: each piece is one system call
        if self._error is not None:
            raise self._error
        return not self._is_stopped

    def _work(self) -> None:
        try:
            while (piece := self._take()) is not None:
                _populate(piece)
        except BaseException as error:
            with self._lock:
                self._is_stopped, self._error = True, self._error or error

    def _take(self) -> torch.Tensor | None:
        with self._lock:
            if self._is_stopped or self._next == len(self._pieces):
                return None
            if not self._may_take(self._left):
                self._is_stopped = True
                return None
            piece = self._pieces[self._next]
            self._next, self._left = self._next + 1, self._left - len(piece)
            return piece


def _populate(piece: torch.Tensor) -> None:
    while (code := _advise(piece, _POPULATE_WRITE)) == errno.EINTR:
        pass
    if code == errno.EINVAL:  # before Linux 5.14: touch every page
        piece[:: mmap.PAGESIZE] = 0
    elif code == errno.ENOMEM:
        raise CapacityError(
            f"host memory: the kernel has no {len(piece) / 2**20:.0f} MiB more for this process",
            needed_bytes=len(piece),
            available_bytes=0,
        )
    elif code:
        raise OSError(code, f"madvise: {os.strerror(code)}")


def _advise(memory: torch.Tensor, advice: int) -> int:
    """-> 0, or errno."""
    return ctypes.get_errno() if _libc.madvise(memory.data_ptr(), memory.nbytes, advice) else 0
