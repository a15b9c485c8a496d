"""A driver for Triton that knows what GPU to compile for, and has none."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["compile_for"]


class _TargetOnly:
    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_for(backend: str, architecture: int, warp_size: int) -> None:
    """From now on kernels of this process are compiled for such a GPU. To be called before any is launched."""
    driver.set_active(_TargetOnly(GPUTarget(backend, architecture, warp_size)))
