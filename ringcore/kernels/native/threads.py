"""How the C kernels run: on the threads of torch's own operations, or recorded into a program."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

__all__ = ["KINDS", "RUN_ARGUMENTS", "check", "how_to_run", "num_threads", "parallel", "set_recorded"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # in the order of the enum in C
RUN_ARGUMENTS = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32  # the last ones of a kernel

num_threads = torch.get_num_threads


class _Recorded(threading.local):
    """Of a thread of Python: into which program its calls are recorded, as operations are into a CUDA graph while the
    stream is captured. Only `NativeProgram` sets it."""

    program: int | None = None


_recorded = _Recorded()


def set_recorded(program: int | None) -> None:
    _recorded.program = program


def how_to_run() -> tuple[int | None, ctypes.c_void_p, int]:
    """The arguments `RUN_ARGUMENTS`: the program to which the call is added, None: it is run; threads."""
    return _recorded.program, parallel(), num_threads()


def check(status: int) -> None:
    """status: of a kernel."""
    if status:
        raise MemoryError("no memory for the intermediate results of a C kernel")


@functools.cache
def parallel() -> ctypes.c_void_p:
    """For the argument of that name; NULL where torch was built with another OpenMP than GNU's, or none: one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return ctypes.c_void_p()
