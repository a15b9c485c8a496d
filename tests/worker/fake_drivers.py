"""The drivers' own interfaces, as `cuda.bindings.driver` and libascendcl have them, over a `FakeVirtualMemory`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from ctypes import c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from fake_virtual_memory import FakeVirtualMemory

from ringcore.errors import CapacityError


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCudaDriver:
    """Functions return a code and what there is beside it; arguments are checked as far as they say something."""

    CUresult = CUresult
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm")

    def __init__(self, memory: FakeVirtualMemory, index: int = 0, supported: int = 1) -> None:
        self.memory, self.index, self.supported = memory, index, supported

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuDeviceGetAttribute(self, attribute: str, index: int) -> tuple[int, int]:
        assert (attribute, index) == ("vmm", self.index)
        return CUresult.CUDA_SUCCESS, self.supported

    def cuGetErrorString(self, code: CUresult) -> tuple[int, bytes]:
        return CUresult.CUDA_SUCCESS, code.name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[int, int]:
        self._check(properties)
        assert option == "recommended"
        return CUresult.CUDA_SUCCESS, self.memory.granularity

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        assert (alignment, address, flags) == (0, 0, 0)
        return self._do(lambda: self.memory.reserve(num_bytes))

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self._check(properties)
        return self._do(lambda: self.memory.create(num_bytes))

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        assert (offset, flags) == (0, 0)
        return self._do(lambda: self.memory.map(address, num_bytes, handle))[:1]

    def cuMemSetAccess(self, address: int, num_bytes: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert len(access) == count == 1
        assert (access[0].location.type, access[0].location.id, access[0].flags) == ("device", self.index, "rw")
        return self._do(lambda: self.memory.set_access(address, num_bytes))[:1]

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple[Any, ...]:
        return self._do(lambda: self.memory.unmap(address, num_bytes))[:1]

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        return self._do(lambda: self.memory.release(handle))[:1]

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple[Any, ...]:
        return self._do(lambda: self.memory.free(address, num_bytes))[:1]

    def _check(self, properties: Any) -> None:
        assert properties.type == "pinned"
        assert (properties.location.type, properties.location.id) == ("device", self.index)

    def _do(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        try:
            return CUresult.CUDA_SUCCESS, call()
        except CapacityError:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        except RuntimeError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None


class FakeTorchCuda:
    """Of torch.cuda what virtual memory needs: waiting, and memory that torch has cached."""

    def __init__(self, memory: FakeVirtualMemory, cached_bytes: int = 0) -> None:
        self.memory, self.cached_bytes = memory, cached_bytes
        memory.free_bytes -= cached_bytes

    def synchronize(self, device: torch.device) -> None:
        self.memory.synchronize()

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.memory.free_bytes, 1 << 40

    def empty_cache(self) -> None:
        self.memory.free_bytes += self.cached_bytes
        self.cached_bytes = 0


class FakeAscendLibrary:
    """A C library as ctypes has it: functions with types, addresses passed by reference, codes returned."""

    def __init__(self, memory: FakeVirtualMemory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        function = _Function(getattr(self, f"_{name}"))
        setattr(self, name, function)
        return function

    def _aclrtMemGetAllocationGranularity(self, properties: Any, option: int, granularity: Any) -> int:
        assert option == 1
        assert _properties(properties) == (0, 0, 4, 3, 1)
        granularity._obj.value = self._memory.granularity
        assert isinstance(granularity._obj, c_size_t)
        return 0

    def _aclrtReserveMemAddress(self, out: Any, num_bytes: int, alignment: int, wanted: Any, flags: int) -> int:
        assert (alignment, wanted, flags) == (0, None, 0)
        return self._do(lambda: self._memory.reserve(num_bytes), out._obj)

    def _aclrtMallocPhysical(self, out: Any, num_bytes: int, properties: Any, flags: int) -> int:
        assert _properties(properties) == (0, 0, 4, 3, 1)
        assert flags == 0
        return self._do(lambda: self._memory.create(num_bytes), out._obj)

    def _aclrtMapMem(self, address: int, num_bytes: int, offset: int, handle: c_void_p, flags: int) -> int:
        assert (offset, flags) == (0, 0)
        code = self._do(lambda: self._memory.map(address, num_bytes, handle.value or 0))
        if not code:
            self._memory.set_access(address, num_bytes)
        return code

    def _aclrtUnmapMem(self, address: int) -> int:
        return self._do(lambda: self._memory.unmap(address, self._memory.mapped[address][0]))

    def _aclrtFreePhysical(self, handle: c_void_p) -> int:
        return self._do(lambda: self._memory.release(handle.value or 0))

    def _aclrtReleaseMemAddress(self, address: int) -> int:
        return self._do(lambda: self._memory.free(address, self._memory.reserved[address]))

    def _aclrtSynchronizeDevice(self) -> int:
        return self._do(self._memory.synchronize)

    def _do(self, call: Callable[[], Any], out: c_void_p | None = None) -> int:
        try:
            value = call()
        except CapacityError:
            return 207001
        except RuntimeError:
            return 107000
        if out is not None:
            out.value = value
        return 0


class _Function:
    argtypes: tuple[Any, ...] | None = None
    restype: Any = None

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> int:
        assert self.argtypes is not None, "ctypes would guess the types"
        assert len(args) == len(self.argtypes)
        return self._function(*args)


def _properties(reference: Any) -> tuple[int, ...]:
    found = reference._obj
    return found.handle_type, found.allocation_type, found.attribute, found.location.id, found.location.type
