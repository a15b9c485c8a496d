"""The memory fence that lock-free shared memory needs on processors that reorder loads or stores (ARM)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["IS_STRONGLY_ORDERED", "make_fence"]

# x86-64 (TSO) keeps stores in order and loads in order: storing the bytes, then the word that publishes them, needs no
# fence.
IS_STRONGLY_ORDERED = os.uname().machine in ("x86_64", "AMD64")
_SEQ_CST = 5  # memory_order_seq_cst of C11


def make_fence(is_strongly_ordered: bool = IS_STRONGLY_ORDERED) -> Callable[[], None] | None:
    """A full fence for producer and consumer, between the bytes and the word that publishes them; None on x86-64.

    It is C11's atomic_thread_fence, from libatomic. Without that library it acquires and releases a lock: CPython
    itself relies on that read-modify-write, and waiters do not spin (see `waiting.spin_budget_s`), so that every
    message they read was also announced by a system call.
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
    import ctypes  # imported only on machines that need the fence

    try:
        function = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    return lambda: function(_SEQ_CST)
