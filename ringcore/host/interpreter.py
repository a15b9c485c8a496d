"""How a child process is started that runs the same code as this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with", "import_path", "interpreter_flags"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def interpreter_flags() -> list[str]:
    """The interpreter options that a child must share, since they change the meaning of its code; and UTF-8."""
    options = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-B": sys.flags.dont_write_bytecode,
        "-O": sys.flags.optimize == 1,
        "-OO": sys.flags.optimize >= 2,
    }
    flags = [name for name, is_on in options.items() if is_on]
    flags += ["-X", "utf8"]  # file names and output are UTF-8
    flags += [f"-W{option}" for option in sys.warnoptions]
    return flags + (["-X", "dev"] if sys.flags.dev_mode else [])


def import_path() -> list[str]:
    """`sys.path`, as JSON can say it."""
    return [os.fsencode(folder).decode("utf-8", "surrogateescape") for folder in sys.path]


def die_with(parent: int) -> None:
    """This process, `parent`'s child, is killed when the thread ends that started it (prctl(2)), and by nothing that a
    terminal sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
