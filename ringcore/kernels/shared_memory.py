"""What part of an SM's fast memory is set aside as shared memory while a kernel is on it; the rest is its cache.

Kernels that have unlike parts set aside are never on an SM together: it has to run empty in between, and there is no
overlap of one kernel's end with the next one's beginning. The driver sets aside what lets most programs of a kernel
share an SM. For a kernel that puts one program on an SM that is needlessly unlike its neighbours, and costs: decoding
one sequence of 640 tokens, Qwen3-8B took 4.26 ms a pass on an H200, and 4.05 ms with what one program needs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["set_aside_for_one_program"]


def set_aside_for_one_program(kernel: Any, device: torch.device) -> None:
    """From the next launch of `kernel` on: a compiled kernel of Triton's as a launch returns it; None: there is none.

    A wish, which the driver may not grant, and which is lost where cuda-bindings is not installed.
    """
    if kernel is not None:
        _prefer(kernel.function, kernel.metadata.shared, device)


@functools.cache  # a launch is to cost no more for it
def _prefer(function: int, num_bytes: int, device: torch.device) -> None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    percent = -(-100 * num_bytes // torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
    carve_out = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (code,) = driver.cuFuncSetAttribute(driver.CUfunction(function), carve_out, percent)
    if int(code):
        raise RuntimeError(f"cuFuncSetAttribute, shared memory carve-out of {percent}%: {code}")
