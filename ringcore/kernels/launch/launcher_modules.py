"""Triton's launchers in several threads.

Triton before 3.7 compiles a launcher for each kernel signature, an extension module that is always called
`__triton_launcher`. Python loads a file of that name for the second time into whichever module of this name it loaded
last. A thread that has just loaded its own finds the launcher of another signature there, and its launch raises
"function takes exactly n arguments".
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType

from triton.runtime import build

__all__ = ["copy_loaded_modules"]

_LOADING = threading.Lock()


def copy_loaded_modules() -> None:
    """Triton gets a copy of each module that it loads, made before another thread can load one. Once a process."""
    load = build._load_module_from_path
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_and_copy(name: str, path: str) -> ModuleType:
        copied = ModuleType(name)
        with _LOADING:
            vars(copied).update(vars(load(name, path)))
        return copied

    build._load_module_from_path = load_and_copy
