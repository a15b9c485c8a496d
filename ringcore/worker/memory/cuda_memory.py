"""CUDA's virtual memory management by the driver API of cuda-bindings, and pinned host copies."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.arena import VirtualMemory
from ringcore.worker.memory.host_link import HostLink

__all__ = ["CudaLink", "CudaVirtualMemory", "tensor_at"]

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


class CudaVirtualMemory(VirtualMemory):
    """The virtual memory of GPU `index` of the process's visible GPUs. driver: the module cuda.bindings.driver."""

    def __init__(self, index: int, driver: Any = None, cuda: Any = torch.cuda) -> None:
        self._cu = driver if driver is not None else _import_driver()
        self._cuda, self._device = cuda, torch.device("cuda", index)
        cuda.synchronize(self._device)  # creates torch's primary context, which all calls use
        location = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = self._cu.CUmemAllocationProp()
        self._properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = location
        self._properties.location.id = index
        self._access = self._cu.CUmemAccessDesc()
        self._access.location.type = location
        self._access.location.id = index
        self._access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, recommended))

    @classmethod
    def refusal(cls, index: int, driver: Any = None) -> str | None:
        """Why virtual memory management is unavailable on GPU `index`; None if it is available."""
        if driver is None and importlib.util.find_spec("cuda") is None:
            return "the package cuda-bindings is not installed"
        try:
            driver = driver if driver is not None else _import_driver()
        except ImportError as error:
            return f"cuda.bindings.driver cannot be imported: {error}"
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        code, value = driver.cuDeviceGetAttribute(attribute, index)
        if int(code):
            return f"the driver does not report whether GPU {index} has virtual memory management: {code}"
        return None if value else f"GPU {index} has no virtual memory management"

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def create(self, num_bytes: int) -> Any:
        """Empties torch's cache and retries where the device is out of memory."""
        try:
            return self._call("cuMemCreate", num_bytes, self._properties, 0)
        except CapacityError:
            self._cuda.empty_cache()
            return self._call("cuMemCreate", num_bytes, self._properties, 0)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)

    def _call(self, name: str, *args: Any) -> Any:
        """Calls the driver; -> what it returns after the error code, which is raised as an exception."""
        code, *values = getattr(self._cu, name)(*args)
        if not int(code):
            return values[0] if values else None
        _, text = self._cu.cuGetErrorString(code)
        message = text.decode() if isinstance(text, bytes) else str(code)
        if int(code) != int(self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise RuntimeError(f"{name} on {self._device}: {message} (error {int(code)})")
        free = int(self._cuda.mem_get_info(self._device)[0])
        needed = next((arg for arg in args if isinstance(arg, int)), 0)
        raise CapacityError(
            f"{name} on {self._device}: {message}: {format_bytes(needed)} asked, {format_bytes(free)} free; lower "
            "gpu_memory_utilization or kv_cache_bytes, or end what else uses this GPU",
            needed_bytes=needed,
            available_bytes=free,
        )


def _import_driver() -> Any:
    from cuda.bindings import driver

    return driver


class _CudaArray:
    """An address with `__cuda_array_interface__` (Numba, "CUDA array interface", version 3)."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] over mapped addresses of `device`. The tensor keeps `owner` alive."""
    tensor = torch.as_tensor(_CudaArray(address, num_bytes, owner), device=device)
    assert tensor.data_ptr() == address, "torch copied the memory instead of viewing it"
    return tensor


class CudaLink(HostLink):
    """H2D and D2H copies on a stream of their own. cuda: torch.cuda. driver: the module cuda.bindings.driver.

    Host memory is pinned by cudaHostRegister: cudaHostAlloc of the same size takes five times as long.
    """

    wants_registered: ClassVar[bool] = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, driver: Any = None) -> None:
        self._cu = driver if driver is not None else _import_driver()
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        code, self._context = self._cu.cuCtxGetCurrent()
        self._check("cuCtxGetCurrent", int(code))

    def register(self, memory: torch.Tensor) -> None:
        """Pins host memory; callable from any thread. The relaxed capture mode keeps this call from invalidating a CUDA
        graph capture that another thread runs at the same time."""
        (code,) = self._cu.cuCtxSetCurrent(self._context)
        self._check("cuCtxSetCurrent", int(code))
        self._cuda.set_device(self._device)  # per thread
        before = self._exchange_mode(self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            code = int(self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        finally:
            self._exchange_mode(before)
        if code == _MEMORY_ALLOCATION:
            raise CapacityError(
                f"cudaHostRegister on {self._device}: {format_bytes(memory.nbytes)} of host memory cannot be pinned; "
                "give sleep_directory, a directory with room for the weights, or sleep with level=2",
                needed_bytes=memory.nbytes,
                available_bytes=0,
            )
        self._check("cudaHostRegister", code)

    def unregister(self, memory: torch.Tensor) -> None:
        self._check("cudaHostUnregister", int(self._cuda.cudart().cudaHostUnregister(memory.data_ptr())))

    def _exchange_mode(self, mode: Any) -> Any:
        """-> the calling thread's previous mode."""
        code, before = self._cu.cuThreadExchangeStreamCaptureMode(mode)
        self._check("cuThreadExchangeStreamCaptureMode", int(code))
        return before

    def _check(self, name: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{name} on {self._device}: error {code}")

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        with self._cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        return event

    def wait(self, copied: Any) -> None:
        copied.synchronize()

    def finish(self) -> None:
        self._stream.synchronize()
