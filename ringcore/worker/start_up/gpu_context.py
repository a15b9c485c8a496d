"""A GPU's context, made while Python imports torch: both take up to a second or two, and neither needs the other."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

__all__ = ["begin_gpu_context"]


def begin_gpu_context(index: int, library: str = "libcuda.so.1") -> threading.Thread:
    """Has CUDA's driver make the context of GPU `index` that everything in this process will use, in a daemon thread.

    It is only time that this saves: where there is no driver or no such GPU nothing happens, and torch says why.
    """
    thread = threading.Thread(target=_retain, args=(index, library), name="gpu context", daemon=True)
    thread.start()
    return thread


def _retain(index: int, library: str) -> None:
    """CUDA driver API, "Primary context management". It is held until the process ends, as torch would hold it."""
    try:
        driver: Any = ctypes.CDLL(library)  # its calls leave the interpreter to others
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
