"""The memory fence for lock-free shared memory, on processors that may reorder stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["IS_STRONGLY_ORDERED", "make_fence"]

# x86-64 keeps stores in order and loads in order, so "bytes first, then the word that publishes them" needs no fence.
IS_STRONGLY_ORDERED = os.uname().machine in ("x86_64", "AMD64")
_SEQ_CST = 5  # memory_order_seq_cst of C11


def make_fence(is_strongly_ordered: bool = IS_STRONGLY_ORDERED) -> Callable[[], None] | None:
    """A full fence between the bytes and the word that publishes them, for producer and consumer; None if not needed.

    It is C11's `atomic_thread_fence` from libatomic. Without that library, acquiring and releasing a lock: CPython
    itself relies on its read-modify-write, and waiters do not spin (see `waiting.spin_budget_s`), so that every message
    that they read was also announced through the kernel.
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
