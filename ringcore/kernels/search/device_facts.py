"""On what the fastest tiles of a product depend beside the product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from ringcore.kernels.linears import packed_fma, skinny_kernels, tma_kernels
from ringcore.kernels.mixtures import experts_kernels

__all__ = ["device_facts"]


def device_facts(device: torch.device) -> Mapping[str, str]:
    """The GPU, what compiles the kernels, and their source."""
    of_linears = skinny_kernels.dot_kernel, skinny_kernels.fma_kernel, packed_fma.packed_fma_kernel
    kernels = *of_linears, tma_kernels.tma_kernel, experts_kernels.grouped_kernel
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": " ".join(kernel.cache_key for kernel in kernels),
    }
