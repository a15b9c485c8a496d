"""The threads of the C kernels: those of torch's own operations."""

from __future__ import annotations

import ctypes
import functools

import torch

__all__ = ["KINDS", "num_threads", "parallel"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # in the order of the enum in C

num_threads = torch.get_num_threads


@functools.cache
def parallel() -> ctypes.c_void_p:
    """For the argument of that name; NULL where torch was built with another OpenMP than GNU's, or none: one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return ctypes.c_void_p()
