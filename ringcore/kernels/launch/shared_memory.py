"""The shared-memory carve-out of a kernel: how an SM's unified L1 memory is split into shared memory and cache.

Kernels with different carve-outs never share an SM: the SM has to drain in between, so the end of one kernel does not
overlap the beginning of the next. By default the driver takes the carve-out with the highest occupancy. For a kernel
with one program per SM that differs needlessly from the kernels around it: decoding one sequence of 640 tokens,
Qwen3-8B took 4.26 ms per pass on an H200, and 4.05 ms with the carve-out for one program.

A kernel whose grid is a fixed number of programs per SM must also not have room for more: SMs that are free first would
take more of them, and others fewer. With three programs on some SMs in place of two on all, 32 sequences of 1,152
tokens took 5.86 ms per pass and not 5.62.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["prefer_cache", "prefer_carveout", "take_all_shared_memory"]

_TAKEN: set[int] = set()  # the devices of which kernels of this process take all shared memory
_RESERVED_BYTES = 1024  # of each program's shared memory, reserved by the driver
_SM_REGISTERS = 1 << 16  # on every architecture so far with dependent launch
_REGISTER_STEP = 8  # allocation granularity per thread


def prefer_carveout(kernel: Any, programs_per_sm: int, device: torch.device) -> None:
    """Sets the carve-out for `programs_per_sm` programs, if that is one or if more would fit; from the next launch on.
    kernel: a compiled kernel as a Triton launch returns it; None (the interpreter, or an intercepted launch) is
    ignored.

    A preference, which the driver may not grant; without cuda-bindings it is not set.
    """
    if kernel is not None:
        num_registers = -(-kernel.n_regs // _REGISTER_STEP) * _REGISTER_STEP * 32 * kernel.metadata.num_warps
        is_all = programs_per_sm == 1 and _index(device) in _TAKEN
        _set_carveout(kernel.function, kernel.metadata.shared, num_registers, programs_per_sm, device, is_all)


def take_all_shared_memory(device: torch.device) -> None:
    """From now on `prefer_carveout` for one program is all shared memory: in a step of one row such a kernel is between
    two that need it all, and an SM would drain for each."""
    _TAKEN.add(_index(device))


def prefer_cache(kernel: Any, device: torch.device) -> None:
    """Where all shared memory is taken, an SM keeps that carve-out until a kernel asks for another: this one, which
    loads through the L1 cache, for none."""
    if kernel is not None and _index(device) in _TAKEN:
        _set_none(kernel.function)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache  # keeps the launch path cheap
def _set_carveout(
    function: int, num_bytes: int, num_registers: int, programs_per_sm: int, device: torch.device, is_all: bool
) -> None:
    """num_bytes, num_registers: of a program."""
    if is_all:
        _set_percent(function, 100)
        return
    sm = torch.cuda.get_device_properties(device)
    reserved = num_bytes + _RESERVED_BYTES
    room = min(sm.shared_memory_per_multiprocessor // reserved, _SM_REGISTERS // num_registers)
    if programs_per_sm > 1 and room <= programs_per_sm:
        return
    percent = min(100, -(-100 * programs_per_sm * reserved // sm.shared_memory_per_multiprocessor)) if num_bytes else 0
    _set_percent(function, percent)


@functools.cache
def _set_none(function: int) -> None:
    _set_percent(function, 0)


def _set_percent(function: int, percent: int) -> None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (code,) = driver.cuFuncSetAttribute(driver.CUfunction(function), carveout, percent)
    if int(code):
        raise RuntimeError(f"cuFuncSetAttribute, shared memory carve-out of {percent}%: {code}")
