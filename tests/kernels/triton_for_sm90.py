"""Triton set up to compile for a GPU that need not be there. To be imported before any kernel is launched."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Sm90:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


driver.set_active(Sm90())
