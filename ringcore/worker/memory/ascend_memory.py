"""Ascend's virtual memory management by the C interface of its runtime, libascendcl.

Written from the documentation (CANN, "AscendCL API: memory management", and the header acl_rt.h) and tested against a
stand-in for the library. It has never run on an Ascend device.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.arena import VirtualMemory

__all__ = ["AscendVirtualMemory"]

_HANDLE_TYPE_NONE = 0  # ACL_MEM_HANDLE_TYPE_NONE
_ALLOCATION_PINNED = 0  # ACL_MEM_ALLOCATION_TYPE_PINNED
_LOCATION_DEVICE = 1  # ACL_MEM_LOCATION_TYPE_DEVICE
_HBM = 1  # ACL_HBM_MEM: pages of all sizes
_HBM_HUGE_PAGES = 4  # ACL_HBM_MEM_HUGE: pages of 2 MiB
_GRANULARITY_RECOMMENDED = 1  # ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED
_OUT_OF_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION


class _Location(Structure):
    _fields_ = [("id", c_uint32), ("type", c_int)]


class _Properties(Structure):
    """aclrtPhysicalMemProp"""

    _fields_ = [
        ("handle_type", c_int),
        ("allocation_type", c_int),
        ("attribute", c_int),
        ("location", _Location),
        ("reserved", c_uint64),
    ]


_ARGUMENTS = {
    "aclrtMemGetAllocationGranularity": (POINTER(_Properties), c_int, POINTER(c_size_t)),
    "aclrtReserveMemAddress": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_uint64),
    "aclrtMallocPhysical": (POINTER(c_void_p), c_size_t, POINTER(_Properties), c_uint64),
    "aclrtMapMem": (c_void_p, c_size_t, c_size_t, c_void_p, c_uint64),
    "aclrtUnmapMem": (c_void_p,),
    "aclrtFreePhysical": (c_void_p,),
    "aclrtReleaseMemAddress": (c_void_p,),
    "aclrtSynchronizeDevice": (),
    "aclrtGetMemInfo": (c_int, POINTER(c_size_t), POINTER(c_size_t)),
}


class AscendVirtualMemory(VirtualMemory):
    """Of device `index`, which is the calling thread's current one. `library`: libascendcl, loaded."""

    def __init__(self, index: int, library: Any = None) -> None:
        """Raises OSError where the library is not installed."""
        self._library = library if library is not None else ctypes.CDLL("libascendcl.so")
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self._index = index
        location = _Location(index, _LOCATION_DEVICE)
        self._properties = _Properties(_HANDLE_TYPE_NONE, _ALLOCATION_PINNED, _HBM_HUGE_PAGES, location, 0)
        granularity = c_size_t()
        self._call(
            "aclrtMemGetAllocationGranularity", byref(self._properties), _GRANULARITY_RECOMMENDED, byref(granularity)
        )
        self.granularity = granularity.value

    def reserve(self, num_bytes: int) -> int:
        address = c_void_p()
        self._call("aclrtReserveMemAddress", byref(address), num_bytes, 0, None, 0, num_bytes=num_bytes)
        assert address.value is not None, "a reservation without an address"
        return address.value

    def create(self, num_bytes: int) -> Any:
        handle = c_void_p()
        self._call("aclrtMallocPhysical", byref(handle), num_bytes, byref(self._properties), 0, num_bytes=num_bytes)
        return handle

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        self._call("aclrtMapMem", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        """Mapped memory is accessible at once."""

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("aclrtUnmapMem", address)

    def release(self, handle: Any) -> None:
        self._call("aclrtFreePhysical", handle)

    def free(self, address: int, num_bytes: int) -> None:
        self._call("aclrtReleaseMemAddress", address)

    def synchronize(self) -> None:
        self._call("aclrtSynchronizeDevice")

    def _call(self, name: str, *args: Any, num_bytes: int = 0) -> None:
        error = getattr(self._library, name)(*args)
        if error == _OUT_OF_MEMORY:
            free = self._free_bytes()
            raise CapacityError(
                f"{name} on Ascend device {self._index}: {format_bytes(num_bytes)} asked, {format_bytes(free)} "
                "free; lower gpu_memory_utilization or kv_cache_bytes, or end what else uses this device",
                needed_bytes=num_bytes,
                available_bytes=free,
            )
        if error:
            raise RuntimeError(f"{name} on Ascend device {self._index}: error {error}")

    def _free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("aclrtGetMemInfo", _HBM, byref(free), byref(total))
        return free.value
