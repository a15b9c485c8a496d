"""Creates a GPU's primary context while Python imports torch: both take up to two seconds and are independent."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

__all__ = ["begin_gpu_context", "has_gpu_driver"]

_DRIVER = "libcuda.so.1"


def begin_gpu_context(index: int, library: str = _DRIVER) -> threading.Thread:
    """Creates the primary context of GPU `index`, which this whole process shares, in a daemon thread.

    An optimization only: without a driver or such a GPU it does nothing, and torch reports the error later.
    """
    thread = threading.Thread(target=_retain, args=(index, library), name="gpu context", daemon=True)
    thread.start()
    return thread


def has_gpu_driver(library: str = _DRIVER) -> bool:
    """Known before torch is imported."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _retain(index: int, library: str) -> None:
    """CUDA driver API, "Primary context management". The context is retained until the process ends, as torch does."""
    try:
        driver: Any = ctypes.CDLL(library)  # its calls release the GIL
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
