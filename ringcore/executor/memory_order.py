"""The one fence that lock-free shared memory needs where the processor may reorder stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["IS_STRONGLY_ORDERED", "make_fence"]

# x86-64 keeps stores in order and loads in order, so "bytes first, then the word that publishes them" needs nothing.
IS_STRONGLY_ORDERED = os.uname().machine in ("x86_64", "AMD64")
_SEQ_CST = 5  # memory_order_seq_cst of C11


def make_fence(is_strongly_ordered: bool = IS_STRONGLY_ORDERED) -> Callable[[], None] | None:
    """A full fence to put between the bytes and the word that publishes them, on both sides; None where none is needed.

    Elsewhere it is C11's own, out of libatomic. Without that library a lock is taken and given back: its
    read-modify-write is what CPython itself relies on there, and waiters do not spin (see `waiting.spin_budget_s`), so
    that every message they take was announced through the kernel as well.
    """
    if is_strongly_ordered:
        return None
    fence = _libatomic_fence()
    if fence is not None:
        return fence
    lock = threading.Lock()

    def lock_fence() -> None:
        with lock:
            pass

    return lock_fence


def _libatomic_fence() -> Callable[[], None] | None:
    import ctypes  # only machines that need the fence pay for this import

    try:
        function = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    return lambda: function(_SEQ_CST)
