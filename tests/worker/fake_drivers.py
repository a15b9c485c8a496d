"""The driver's own interface, as `cuda.bindings.driver` has it, over a `FakeVirtualMemory`, and parts of torch.cuda."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fake_virtual_memory import FakeVirtualMemory
from torch.overrides import TorchFunctionMode

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


class FakeRuntime:
    """Of torch.cuda, and of cuda.bindings.driver, what copies to and from the host need. What they touch must have been
    registered, as one piece, by a thread that disturbs no capture."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address: bytes
        self.copies: list[tuple[int, int]] = []  # the host's side of each
        self.devices: set[torch.device] = set()
        self.registering_threads: set[int] = set()
        self.code = 0  # what registration comes to
        self.gate: threading.Event | None = None  # registration waits for it
        self.waiting: list[int] = []
        self.is_idle = True
        self._of_thread = threading.local()

    def cuCtxGetCurrent(self) -> tuple[int, str]:
        return 0, "the context"

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:
        self._of_thread.context = context
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        if vars(self._of_thread).get("context") != "the context":
            return 201, ""  # CUDA_ERROR_INVALID_CONTEXT
        before = vars(self._of_thread).get("mode", "global")
        self._of_thread.mode = mode
        return 0, before

    def set_device(self, device: torch.device) -> None:
        self.devices.add(device)

    def cudart(self) -> FakeRuntime:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        assert self._of_thread.mode == "relaxed", "a capture in another thread would be invalidated"
        if self.gate is not None:
            self.waiting.append(address)
            assert self.gate.wait(20)
        self.registering_threads.add(threading.get_ident())
        if not self.code:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert self.is_idle, "a copy may be under way"
        return 0 if self.registered.pop(address, None) else 1

    def Stream(self, device: torch.device) -> FakeRuntime:
        self.devices.add(device)
        return self

    def Event(self) -> FakeRuntime:
        return self

    def record(self, stream: FakeRuntime) -> None:
        assert stream is self
        self.is_idle = False

    def synchronize(self) -> None:
        self.is_idle = True

    @contextmanager
    def stream(self, stream: FakeRuntime) -> Iterator[None]:
        assert stream is self
        with _CopiesSeen(self):
            yield


class _CopiesSeen(TorchFunctionMode):
    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            assert (kwargs or {}).get("non_blocking"), "the host would wait"
            begins = [(t.data_ptr(), len(t)) for t in args[:2]]
            known = [
                (at, n)
                for at, n in begins
                if any(begin <= at and at + n <= begin + size for begin, size in self._runtime.registered.items())
            ]
            assert len(known) == 1, "one side of a copy is registered, and all of it in one piece"
            self._runtime.copies += known
        return func(*args, **(kwargs or {}))
