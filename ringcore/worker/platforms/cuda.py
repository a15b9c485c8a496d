"""One NVIDIA GPU as a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ringcore.errors import ConfigError
from ringcore.model_executor.parallel import TensorParallel
from ringcore.worker.communicator import NcclCommunicator
from ringcore.worker.platform import Platform

__all__ = ["CudaPlatform"]

_BFLOAT16_SINCE = (8, 0)  # compute capability: below, bfloat16 is emulated


class CudaPlatform(Platform):
    """Rank i has GPU i of those that the process may see. `cuda` is torch's module of that name."""

    attention_backends: ClassVar[Sequence[str]] = ("triton", "flash_attn")
    default_memory_share: ClassVar[float] = 0.9
    attention_gathers: ClassVar[bool] = False

    def __init__(self, rank: int = 0, cuda: Any = torch.cuda) -> None:
        """Raises `ConfigError` where there is no GPU for the rank."""
        count = cuda.device_count() if cuda.is_available() else 0
        if rank >= count:
            raise ConfigError(
                f"device='cuda': rank {rank} needs GPU {rank}, and the process sees {count}; lower "
                "tensor_parallel_size, look at CUDA_VISIBLE_DEVICES, or give device='cpu'",
                option="device",
                value="cuda",
            )
        self._cuda = cuda
        self.device = torch.device("cuda", rank)
        cuda.set_device(self.device)

    @classmethod
    def is_present(cls) -> bool:
        return torch.cuda.is_available()

    def connect(self, rank: int, size: int, rendezvous: str) -> TensorParallel:
        return NcclCommunicator(rank, size, rendezvous, self.device)

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        if asked != "auto":
            return asked
        is_slow = checkpoint == "bfloat16" and self._cuda.get_device_capability(self.device) < _BFLOAT16_SINCE
        return "float16" if is_slow else checkpoint

    def total_memory_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[1])

    def free_memory_bytes(self) -> int:
        """What the card has, and what torch holds of it and does not use."""
        unused = self._cuda.memory_reserved(self.device) - self._cuda.memory_allocated(self.device)
        return int(self._cuda.mem_get_info(self.device)[0] + unused)

    def memory_budget_bytes(self, share: float, num_ranks: int) -> int:
        """`share` of the card less what this process has of it: a neighbour on the card is no part of the sum. But
        never more than is free."""
        mine = self._own_memory_bytes()
        return max(0, min(int(self.total_memory_bytes() * share) - mine, self.free_memory_bytes()))

    def _own_memory_bytes(self) -> int:
        """What this process has of the card, the driver's share included; all that is in use where nobody can tell."""
        unused = self._cuda.memory_reserved(self.device) - self._cuda.memory_allocated(self.device)
        used = _bytes_by_nvml(self.device.index)
        return (self.total_memory_bytes() - self.free_memory_bytes()) if used is None else max(0, used - unused)

    def allocate_pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)


def _bytes_by_nvml(index: int) -> int | None:
    """This process's memory on a GPU by the driver's management library; None where it is not there or cannot tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    used = {process.pid: process.usedGpuMemory for process in processes}
    own: int | None = used.get(os.getpid())
    return own
