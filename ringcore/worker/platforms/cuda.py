"""One NVIDIA GPU as a device."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ringcore.distributed.communicator import NcclCommunicator
from ringcore.distributed.parallel import Stage, TensorParallel
from ringcore.distributed.pipeline import NcclLink, StageLink
from ringcore.distributed.rendezvous import Rendezvous
from ringcore.errors import ConfigError
from ringcore.worker.memory.arena import Arena
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.memory.cuda_blocks import CudaBlockLink
from ringcore.worker.memory.cuda_memory import CudaLink, CudaVirtualMemory, tensor_at
from ringcore.worker.memory.device_memory import ArenaMemory, DeviceMemory, MemoryTag, PlainMemory
from ringcore.worker.memory.nvml import GpuMonitor, process_bytes
from ringcore.worker.platforms.platform import Platform, ProcessMemory

__all__ = ["CudaPlatform"]

_log = logging.getLogger(__name__)

_BFLOAT16_SINCE = (8, 0)  # compute capability: below, bfloat16 is emulated


class CudaPlatform(Platform):
    """Rank i uses GPU i of the process's visible GPUs. cuda: torch.cuda."""

    attention_backends: ClassVar[Sequence[str]] = ("triton", "flash_attn", "triton_mla")
    default_memory_share: ClassVar[float] = 0.9
    attention_gathers: ClassVar[bool] = False
    measures_steps: ClassVar[bool] = True

    def __init__(
        self,
        rank: int = 0,
        cuda: Any = torch.cuda,
        device_memory: str = "auto",
        driver: Any = None,
        enable_sleep_mode: bool = False,
    ) -> None:
        """device_memory, enable_sleep_mode: the engine options; the latter needs arenas. driver: the module
        cuda.bindings.driver, imported if None. Raises `ConfigError` where there is no GPU for the rank, or no arenas
        though the options need them."""
        count = cuda.device_count() if cuda.is_available() else 0
        if rank >= count:
            raise ConfigError(
                f"device='cuda': rank {rank} needs GPU {rank}, and the process sees {count}; lower "
                "tensor_parallel_size, look at CUDA_VISIBLE_DEVICES, or give device='cpu'",
                option="device",
                value="cuda",
            )
        self._cuda, self._driver = cuda, driver
        self.device = torch.device("cuda", rank)
        cuda.set_device(self.device)
        self._memory = self._choose_memory(device_memory, driver, enable_sleep_mode)
        self._monitor = GpuMonitor(lambda: str(cuda.get_device_properties(self.device).uuid))

    def _choose_memory(self, asked: str, driver: Any, enable_sleep_mode: bool) -> DeviceMemory:
        refusal = CudaVirtualMemory.refusal(self.device.index, driver)
        if enable_sleep_mode and (asked == "plain" or refusal is not None):
            raise ConfigError(
                "enable_sleep_mode=True: weights and KV cache have to be in arenas, and "
                f"{refusal or 'device_memory=plain has none'}; leave enable_sleep_mode out, or make arenas possible "
                "(pip install ringcore[cuda])",
                option="enable_sleep_mode",
                value=True,
            )
        if asked == "arena" and refusal is not None:
            raise ConfigError(
                f"device_memory='arena': {refusal}; give 'auto' or 'plain'", option="device_memory", value=asked
            )
        if asked == "plain" or refusal is not None:
            reason = "as device_memory='plain' asks" if asked == "plain" else f"since {refusal}"
            _log.info("weights and KV cache on %s are allocated by torch, not in arenas, %s", self.device, reason)
            return PlainMemory(self.device)
        memory = CudaVirtualMemory(self.device.index, driver, self._cuda)
        return ArenaMemory(self.total_memory_bytes(), memory, partial(tensor_at, device=self.device))

    @classmethod
    def is_present(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def open(cls, rank: int, device_memory: str, enable_sleep_mode: bool) -> CudaPlatform:
        return cls(rank, device_memory=device_memory, enable_sleep_mode=enable_sleep_mode)

    def connect(self, rank: int, size: int, rendezvous: Rendezvous, name: str, one_host: bool) -> TensorParallel:
        return NcclCommunicator(rank, size, rendezvous, self.device, name, one_host)

    def link(self, stage: Stage, rendezvous: Rendezvous, name: str) -> StageLink:
        return NcclLink(stage, rendezvous, name, self.device)

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        if asked != "auto":
            return asked
        is_slow = checkpoint == "bfloat16" and self._cuda.get_device_capability(self.device) < _BFLOAT16_SINCE
        return "float16" if is_slow else checkpoint

    def total_memory_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[1])

    def free_memory_bytes(self) -> int:
        """The device's free memory, plus torch's cached free memory."""
        unused = self._cuda.memory_reserved(self.device) - self._cuda.memory_allocated(self.device)
        return int(self._cuda.mem_get_info(self.device)[0] + unused)

    def shared_memory_bytes(self, num_ranks: int) -> int:
        """The whole card: each rank has its own."""
        return self.total_memory_bytes()

    def memory_budget_bytes(self, asked_bytes: int) -> int:
        """Less what this process uses of the card, other processes' memory not counted; at most the free memory."""
        return min(asked_bytes - self._own_memory_bytes(), self.free_memory_bytes())

    def _own_memory_bytes(self) -> int:
        """What this process uses of the card, including the driver's share, without torch's cached free memory."""
        unused = int(self._cuda.memory_reserved(self.device) - self._cuda.memory_allocated(self.device))
        return max(0, self.process_memory().own_bytes - unused)

    def process_memory(self) -> ProcessMemory:
        """By NVML; where NVML cannot attribute memory, all used memory of the card counts as this process's."""
        torch_bytes, arena_bytes = int(self._cuda.memory_reserved(self.device)), self._memory.mapped_bytes
        own = process_bytes(str(self._cuda.get_device_properties(self.device).uuid), os.getpid())
        if own is None or own < torch_bytes + arena_bytes:  # below the known minimum: NVML's pid is another process
            free, total = self._cuda.mem_get_info(self.device)
            own = int(total) - int(free)
        return ProcessMemory(own, torch_bytes, arena_bytes)

    def usage(self) -> dict[str, float]:
        """Of the whole card, by NVML; empty without it."""
        return self._monitor.usage()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Measured by what torch's allocator reserves, so that fragmentation counts."""
        cuda, device = self._cuda, self.device
        cuda.synchronize(device)
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(device)
        before = cuda.memory_reserved(device)
        run()
        cuda.synchronize(device)
        return int(cuda.max_memory_reserved(device) - before)

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        memory = self._memory.allocate(num_bytes, tag)
        return memory.zero_() if tag == "kv_cache" else memory

    @property
    def arenas(self) -> Mapping[str, Arena]:
        return self._memory.arenas

    def release_cached(self) -> int:
        before = self._cuda.memory_reserved(self.device)
        self._cuda.empty_cache()
        return int(before - self._cuda.memory_reserved(self.device))

    def host_link(self) -> CudaLink:
        return CudaLink(self.device, self._cuda, self._driver)

    def block_link(self, pages: BlockPages) -> CudaBlockLink:
        try:
            return CudaBlockLink(pages, self.host_link(), self._cuda)
        except ImportError as error:
            raise ConfigError(
                f"host_kv_cache_bytes: host memory cannot be pinned: cuda.bindings.driver cannot be imported: {error}; "
                "run pip install 'ringcore[cuda]', or leave host_kv_cache_bytes out",
                option="host_kv_cache_bytes",
                value=None,
            ) from error

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def close(self) -> None:
        gc.collect()  # tensors in reference cycles hold memory
        self._memory.close()
        self._cuda.empty_cache()
