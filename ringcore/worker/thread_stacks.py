"""The Python stacks of this process's threads."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["thread_stacks"]


def thread_stacks() -> str:
    """The Python stack of every thread, by name, innermost call last. Does not stop the threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    blocks = []
    for ident in sorted(frames, key=lambda ident: (ident != threading.main_thread().ident, ident)):
        blocks.append(f"thread {names.get(ident, ident)!r}:\n{''.join(traceback.format_stack(frames[ident]))}")
    return "".join(blocks)
