"""What part of an SM's fast memory is set aside as shared memory while a kernel is on it; the rest is its cache.

Kernels that have unlike parts set aside are never on an SM together: it has to run empty in between, and there is no
overlap of one kernel's end with the next one's beginning. The driver sets aside what lets most programs of a kernel
share an SM. For a kernel that puts one program on an SM that is needlessly unlike its neighbours, and costs: decoding
one sequence of 640 tokens, Qwen3-8B took 4.26 ms a pass on an H200, and 4.05 ms with what one program needs.

And a kernel whose grid is so many programs for every SM must not have room for more: SMs that are free first would take
more of them, and others get fewer. With three on some SMs in place of two on all, 32 sequences of 1,152 tokens took
5.86 ms a pass and not 5.62.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["set_aside"]

_RESERVED_BYTES = 1024  # of each program's shared memory, for the driver
_SM_REGISTERS = 1 << 16  # of every architecture so far that has dependent launch
_REGISTER_STEP = 8  # a thread gets a multiple of so many


def set_aside(kernel: Any, programs_per_sm: int, device: torch.device) -> None:
    """For `programs_per_sm` programs, if that is one or if there would be room for more; from the next launch of
    `kernel` on: a compiled kernel of Triton's as a launch returns it; None: there is none.

    A wish, which the driver may not grant, and which is lost where cuda-bindings is not installed.
    """
    if kernel is not None:
        num_registers = -(-kernel.n_regs // _REGISTER_STEP) * _REGISTER_STEP * 32 * kernel.metadata.num_warps
        _prefer(kernel.function, kernel.metadata.shared, num_registers, programs_per_sm, device)


@functools.cache  # a launch is to cost no more for it
def _prefer(function: int, num_bytes: int, num_registers: int, programs_per_sm: int, device: torch.device) -> None:
    """num_bytes, num_registers: of a program."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    sm = torch.cuda.get_device_properties(device)
    reserved = num_bytes + _RESERVED_BYTES
    room = min(sm.shared_memory_per_multiprocessor // reserved, _SM_REGISTERS // num_registers)
    if programs_per_sm > 1 and room <= programs_per_sm:
        return
    percent = min(100, -(-100 * programs_per_sm * reserved // sm.shared_memory_per_multiprocessor)) if num_bytes else 0
    carve_out = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (code,) = driver.cuFuncSetAttribute(driver.CUfunction(function), carve_out, percent)
    if int(code):
        raise RuntimeError(f"cuFuncSetAttribute, shared memory carve-out of {percent}%: {code}")
