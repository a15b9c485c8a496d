"""The Python stacks of this process's threads."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["thread_stacks"]

_MAX_FRAMES = 100  # of a thread: the innermost


def thread_stacks() -> str:
    """Each thread, the main thread first, by name, the most recent call first. Does not stop the threads, and reads no
    file for source lines: a file system may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    order = sorted(frames, key=lambda ident: (ident != threading.main_thread().ident, ident))
    return "".join(_stack(str(names.get(ident, ident)), frames[ident]) for ident in order)


def _stack(name: str, frame: FrameType | None) -> str:
    lines = [f"thread {name!r} (most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, ""])
