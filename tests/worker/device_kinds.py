"""Every implementation of virtual memory, over a device that can be looked into and made to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fake_ascendcl import FakeAscend
from fake_drivers import FakeCudaDriver, FakeTorchCuda
from fake_virtual_memory import FakeDevice, FakeVirtualMemory

from ringcore.worker.memory.arena import VirtualMemory
from ringcore.worker.memory.cuda_memory import CudaVirtualMemory
from ringcore.worker.memory.host_memory import HostVirtualMemory

__all__ = ["DEVICES", "PAGE", "WatchedHost", "make_device"]

PAGE = FakeVirtualMemory.granularity


class WatchedHost(HostVirtualMemory, FakeDevice):
    """The CPU's own, with a book kept of it. It has as much memory as it is told."""

    def __init__(self, physical_bytes: int) -> None:
        HostVirtualMemory.__init__(self, lambda: self.free_bytes)
        self.free_bytes = physical_bytes
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # handle: bytes
        self.mapped: dict[int, tuple[int, int]] = {}
        self.is_busy = False
        self._failing: dict[str, int] = {}

    @property
    def accessible(self) -> Any:
        return self.mapped.keys()

    def launch(self, tensor: torch.Tensor) -> None:
        """A CPU has done its work when it returns."""
        self.check_access(tensor)

    def fail_after(self, name: str, count: int) -> None:
        self._failing[name] = count

    def _called(self, name: str) -> None:
        if name in self._failing:
            self._failing[name] -= 1
            if self._failing[name] < 0:
                del self._failing[name]
                raise RuntimeError(f"{name} fails")

    def reserve(self, num_bytes: int) -> int:
        self._called("reserve")
        address = super().reserve(num_bytes)
        self.reserved[address] = num_bytes
        return address

    def create(self, num_bytes: int) -> int:
        self._called("create")
        handle = super().create(num_bytes)
        self.free_bytes -= num_bytes
        self.handles[handle] = num_bytes
        return handle

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        self._called("map")
        super().map(address, num_bytes, handle)
        self.mapped[address] = num_bytes, handle

    def set_access(self, address: int, num_bytes: int) -> None:
        self._called("set_access")
        super().set_access(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._called("unmap")
        assert self.mapped.pop(address)[0] == num_bytes
        super().unmap(address, num_bytes)

    def release(self, handle: Any) -> None:
        self._called("release")
        super().release(handle)
        self.free_bytes += self.handles.pop(handle)

    def free(self, address: int, num_bytes: int) -> None:
        self._called("free")
        assert self.reserved.pop(address) == num_bytes
        super().free(address, num_bytes)


def _fake(physical_bytes: int) -> tuple[FakeDevice, VirtualMemory]:
    device = FakeVirtualMemory(physical_bytes)
    return device, device


def _cuda(physical_bytes: int) -> tuple[FakeDevice, VirtualMemory]:
    device = FakeVirtualMemory(physical_bytes)
    return device, CudaVirtualMemory(0, FakeCudaDriver(device), FakeTorchCuda(device))


def _ascend(physical_bytes: int) -> tuple[FakeDevice, VirtualMemory]:
    device = FakeAscend(physical_bytes)
    return device, device.memory


def _host(physical_bytes: int) -> tuple[FakeDevice, VirtualMemory]:
    device = WatchedHost(physical_bytes)
    return device, device


DEVICES: Mapping[str, Callable[[int], tuple[FakeDevice, VirtualMemory]]] = {
    "fake": _fake,
    "cuda": _cuda,
    "ascend": _ascend,
    "host": _host,
}


def make_device(kind: str, num_pages: int) -> tuple[FakeDevice, VirtualMemory]:
    return DEVICES[kind](num_pages * PAGE)
