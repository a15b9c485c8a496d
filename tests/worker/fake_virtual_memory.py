"""Virtual memory of a device that is not there: host memory, mapped as a driver maps its own, every call checked.

What an arena does wrong on a real device is an illegal access or a leak, found late; here it is an error at once.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ringcore.errors import CapacityError
from ringcore.worker.memory.arena import VirtualMemory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FIXED, _NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_FAILED = ctypes.c_void_p(-1).value


class Misuse(Exception):
    """A call that a driver would refuse, or worse, not refuse."""


class FakeDevice(ABC):
    """What the tests ask of a device that is not there."""

    free_bytes: int
    reserved: Mapping[int, int]  # address: bytes
    handles: Mapping[int, Any]
    mapped: Mapping[int, tuple[int, int]]  # address: bytes, handle
    accessible: Collection[int]  # addresses of what is mapped
    is_busy: bool

    @abstractmethod
    def fail_after(self, name: str, count: int) -> None:
        """The call of that name (of `VirtualMemory`) fails after `count` more of them, once."""

    @abstractmethod
    def create(self, num_bytes: int) -> Any:
        """Memory of another tenant."""

    @abstractmethod
    def release(self, handle: Any) -> None: ...

    def launch(self, tensor: torch.Tensor) -> None:
        """As if the device began to work with it."""
        self.check_access(tensor)
        self.is_busy = True

    def check_access(self, tensor: torch.Tensor) -> None:
        """Raises `Misuse` where reading or writing the tensor would be an illegal access."""
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        while at < end:
            found = [begin + self.mapped[begin][0] for begin in self.accessible if begin <= at]
            behind = max((stop for stop in found if stop > at), default=None)
            if behind is None:
                raise Misuse(f"access to {at:#x}, which has no memory behind it")
            at = behind

    def check_nothing_left(self) -> None:
        assert not self.reserved
        assert not self.mapped
        assert not self.handles


class FakeVirtualMemory(FakeDevice, VirtualMemory):
    """`physical_bytes` of memory. `fail_after(name, count)`: the call of that name raises after `count` more of them.
    "copy" is such a name too.

    New memory holds 0xA5 in every byte, as if another tenant had left it there.
    """

    granularity = 64 << 10

    def __init__(self, physical_bytes: int = 64 << 20) -> None:
        self.free_bytes = physical_bytes
        self.reserved: dict[int, int] = {}  # address: bytes
        self.handles: dict[int, tuple[int, int]] = {}  # handle: file, bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address: bytes, handle
        self.accessible: set[int] = set()  # addresses of what is mapped
        self.is_busy = False
        self.calls: list[str] = []
        self._failing: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # begun, not ended: from, to

    def fail_after(self, name: str, count: int) -> None:
        self._failing[name] = count

    def _called(self, name: str, *sizes: int) -> None:
        self.calls.append(name)
        if any(size % self.granularity for size in sizes):
            raise Misuse(f"{name}: {sizes} are no multiples of {self.granularity}")
        if name in self._failing:
            if not self._failing[name]:
                del self._failing[name]
                raise RuntimeError(f"{name} fails")
            self._failing[name] -= 1

    def reserve(self, num_bytes: int) -> int:
        self._called("reserve", num_bytes)
        address = _map(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        self.reserved[address] = num_bytes
        return address

    def create(self, num_bytes: int) -> int:
        self._called("create", num_bytes)
        if num_bytes > self.free_bytes:
            raise CapacityError(
                f"{num_bytes} bytes asked, {self.free_bytes} free",
                needed_bytes=num_bytes,
                available_bytes=self.free_bytes,
            )
        self.free_bytes -= num_bytes
        file = os.memfd_create("physical memory")
        os.write(file, b"\xa5" * num_bytes)
        handle = next(self._numbers)
        self.handles[handle] = file, num_bytes
        return handle

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._called("map", num_bytes)
        if handle not in self.handles:
            raise Misuse("map: no such memory")
        if any(other == handle for _, other in self.mapped.values()):
            raise Misuse("map: the memory is mapped elsewhere")
        if self.handles[handle][1] != num_bytes:
            raise Misuse("map: not all of the memory")
        if not any(begin <= address and address + num_bytes <= begin + n for begin, n in self.reserved.items()):
            raise Misuse("map: addresses that are not reserved")
        if any(begin < address + num_bytes and address < begin + n for begin, (n, _) in self.mapped.items()):
            raise Misuse("map: addresses that are mapped")
        _map(address, num_bytes, _PROT_NONE, mmap.MAP_SHARED | _FIXED, self.handles[handle][0])
        self.mapped[address] = num_bytes, handle

    def set_access(self, address: int, num_bytes: int) -> None:
        self._called("set_access", num_bytes)
        if self.mapped.get(address, (0, 0))[0] != num_bytes:
            raise Misuse("set_access: addresses that are not mapped as one")
        if _libc.mprotect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.accessible.add(address)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._called("unmap", num_bytes)
        if self.mapped.get(address, (0, 0))[0] != num_bytes:
            raise Misuse("unmap: not what one map put there")
        if self.is_busy:
            raise Misuse("unmap: the device was not waited for")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _map(address, num_bytes, _PROT_NONE, flags, -1)
        del self.mapped[address]
        self.accessible.discard(address)

    def release(self, handle: int) -> None:
        self._called("release")
        if handle not in self.handles:
            raise Misuse("release: no such memory")
        if any(other == handle for _, other in self.mapped.values()):
            raise Misuse("release: the memory is mapped")
        file, num_bytes = self.handles.pop(handle)
        os.close(file)
        self.free_bytes += num_bytes

    def free(self, address: int, num_bytes: int) -> None:
        self._called("free", num_bytes)
        if self.reserved.get(address) != num_bytes:
            raise Misuse("free: not what one reserve took")
        if any(address <= begin < address + num_bytes for begin in self.mapped):
            raise Misuse("free: something is mapped there")
        del self.reserved[address]
        _libc.munmap(address, num_bytes)

    def synchronize(self) -> None:
        self._called("synchronize")
        self.end_copies()
        self.is_busy = False

    def begin_copy(self, source: torch.Tensor, out: torch.Tensor) -> int:
        """A copy that ends, with all before it, when somebody waits; -> its number."""
        self._called("copy")
        number = next(self._numbers)
        self._copies[number] = source, out
        self.is_busy = True
        return number

    def end_copies(self, last: int | None = None) -> None:
        """Those up to a number, or all."""
        for number in [n for n in self._copies if last is None or n <= last]:
            source, out = self._copies.pop(number)
            out.copy_(source)


def view(address: int, num_bytes: int, owner: object) -> torch.Tensor:
    """uint8 [num_bytes] over host addresses."""
    array = (ctypes.c_uint8 * num_bytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


def _map(address: int | None, num_bytes: int, access: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, num_bytes, access, flags, file, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)
