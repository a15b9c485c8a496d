"""Kernels in CUDA C++, launched as Triton's are: compiled before the first launch, found by an interception, with
programmatic dependent launch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from triton.runtime import driver as triton_driver

from ringcore.kernels.launch.dependent_launch import supports_pdl
from ringcore.kernels.launch.nvrtc import compile_cuda, nvrtc_version
from ringcore.kernels.launch.shared_memory import take_all_shared_memory

__all__ = ["FLOAT", "INT", "NUMBERS", "POINTER", "CudaKernel", "LoadedKernel", "tensor_map"]

_PTX = Path(__file__).with_name("ptx.cuh")  # before every source
NUMBERS = Path(__file__).with_name("numbers.cuh")  # a header
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class CudaKernel:
    """A function of a .cu file. It has what `precompile.Variant` and the lists of kernels read of a Triton kernel.

    A specialization is a JSON object: macros, and the bytes of shared memory.
    """

    # Whether this launch is intercepted; set while launches are, see `precompile.intercept_launches`.
    interceptor: ClassVar[Callable[[CudaKernel, str], bool] | None] = None

    def __init__(
        self,
        module: str,
        name: str,
        source: Path,
        threads: int,
        headers: Sequence[Path] = (),
        *,
        is_alone: bool = False,
    ) -> None:
        """module, name: where this object is found. source: the file, called as its function. threads: of a program.
        headers: what the source is put behind. is_alone: a program has an SM for itself."""
        self.fn = SimpleNamespace(__module__=module, __name__=name, __globals__={})
        self.src = "".join(path.read_text() for path in (_PTX, *headers, source))
        self.hash = ""  # Triton parses a kernel that has none yet
        self._function, self._threads, self._is_alone = source.stem, threads, is_alone
        self._loaded: dict[tuple[int, str], LoadedKernel] = {}

    @property
    def cache_key(self) -> str:
        return hashlib.sha256(f"{self.src}{nvrtc_version()}".encode()).hexdigest()

    @property
    def device_caches(self) -> dict[int, Any]:
        """Read before a compilation, since a Triton kernel makes its caches then."""
        return {triton_driver.active.get_current_device(): self._loaded}

    def preload(self, specialization: str) -> LoadedKernel:
        """Compiles it, or finds it compiled. Raises `NvrtcError`."""
        content, arch = json.loads(specialization), triton_driver.active.get_current_target().arch
        macros = [f"{name}={value}" for name, value in content["macros"].items()]
        cubin = compile_cuda(self.src, f"sm_{arch}a" if arch >= 90 else f"sm_{arch}", macros)
        keep = functools.partial(self._keep, specialization)
        return LoadedKernel(cubin, self._function, content["shared_bytes"], keep, is_alone=self._is_alone)

    def is_loaded(self, specialization: str) -> bool:
        return (triton_driver.active.get_current_device(), specialization) in self._loaded

    def launch(self, programs: int, specialization: str, arguments: Callable[[], Sequence[tuple[Any, Any]]]) -> None:
        """On the current device and stream. arguments: of each the value and the ctypes type, which is None of a tensor
        map; called where the kernel is launched."""
        if CudaKernel.interceptor is not None and CudaKernel.interceptor(self, specialization):
            return
        device = torch.cuda.current_device()
        loaded = self._loaded.get((device, specialization)) or self.preload(specialization)
        function = loaded.run
        pdl = supports_pdl(torch.device("cuda", device))
        config = _launch_config(programs, self._threads, loaded.shared_bytes, torch.cuda.current_stream(), pdl)
        values, types = zip(*arguments(), strict=True)
        call_driver("cuLaunchKernelEx", config, function, (values, types), 0)

    def _keep(self, specialization: str, loaded: LoadedKernel) -> None:
        self._loaded[torch.cuda.current_device(), specialization] = loaded


class LoadedKernel:
    """A cubin, which `run` loads onto the current device."""

    def __init__(
        self,
        cubin: bytes,
        function: str,
        shared_bytes: int,
        keep: Callable[[LoadedKernel], object],
        *,
        is_alone: bool = False,
    ) -> None:
        """keep: called with this when it is loaded."""
        self.cubin, self.shared_bytes, self._is_alone = cubin, shared_bytes, is_alone
        self._function, self._keep = function, keep

    @functools.cached_property
    def run(self) -> Any:
        """The driver's function."""
        attributes = _driver().CUfunction_attribute
        module = call_driver("cuModuleLoadData", self.cubin)
        function = call_driver("cuModuleGetFunction", module, self._function.encode())
        dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call_driver("cuFuncSetAttribute", function, dynamic, self.shared_bytes)
        carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call_driver("cuFuncSetAttribute", function, carveout, 100)
        if not self._is_alone:  # then programs of two kernels are on an SM at once
            take_all_shared_memory(torch.device("cuda", torch.cuda.current_device()))
        self._keep(self)
        return function


@functools.lru_cache(4096)  # a weight's are the same in every launch
def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    is_swizzled: bool,
) -> Any:
    """What TMA takes: boxes of a tensor, from the innermost axis on; out of bounds 0. strides: in bytes, but of the
    first axis, which is contiguous. is_swizzled: 128 bytes, of 8 rows."""
    driver = _driver()
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = {torch.uint8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, torch.float32: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32}
    return call_driver(
        "cuTensorMapEncodeTiled",
        kind[dtype],
        len(shape),
        pointer,
        [driver.cuuint64_t(size) for size in shape],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if is_swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def call_driver(name: str, *arguments: Any) -> Any:
    """Raises RuntimeError, which names the function and its code."""
    code, *found = getattr(_driver(), name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name}: {code.name}")
    return found[0] if found else None


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _launch_config(programs: int, threads: int, shared_bytes: int, stream: torch.cuda.Stream, pdl: bool) -> Any:
    driver = _driver()
    config, attribute, value = driver.CUlaunchConfig(), driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream.cuda_stream
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = int(pdl)
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    return config
