"""Makes the i-th system call of ringcore fail, as the kernel might: in this process, in this thread."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

# What each call may fail with in practice. Not EINTR: Python repeats a call that a signal interrupted by itself.
FAILURES = [
    (os, "memfd_create", (errno.EMFILE, errno.ENOMEM)),
    (os, "posix_fallocate", (errno.ENOSPC, errno.ENOMEM)),
    (os, "eventfd", (errno.EMFILE, errno.ENOMEM)),
    (os, "dup", (errno.EMFILE,)),
    (os, "pipe2", (errno.EMFILE,)),
    (os, "pidfd_open", (errno.EMFILE, errno.ENOMEM)),
    (os, "write", (errno.ENOSPC, errno.ENOMEM)),
    (mmap, "mmap", (errno.ENOMEM, errno.EAGAIN)),
    (socket, "socketpair", (errno.EMFILE, errno.ENOMEM)),
    (socket, "send_fds", (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)),
    (socket, "recv_fds", (errno.EAGAIN, errno.ENOMEM)),
    (subprocess, "Popen", (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)),
]


class Failer:
    """Counts the calls of `FAILURES` that code of ringcore makes in this thread, and fails one of them."""

    def __init__(self, nth: int, choice: int) -> None:
        self._nth, self._choice = nth, choice
        self._thread = threading.get_ident()
        self.num_calls = 0
        self.failed: str | None = None

    def _wrap(self, function, name: str, numbers: tuple[int, ...]):
        def wrapper(*args, **kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("ringcore.") and threading.get_ident() == self._thread and self.failed is None:
                self.num_calls += 1
                if self.num_calls == self._nth:
                    number = numbers[self._choice % len(numbers)]
                    self.failed = f"{name} in {caller} with {errno.errorcode[number]}"
                    raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        return wrapper

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        saved = [(module, name, getattr(module, name)) for module, name, _ in FAILURES]
        for module, name, numbers in FAILURES:
            found = getattr(module, name)
            setattr(
                module,
                name,
                _failing_class(found, self, name, numbers)
                if isinstance(found, type)
                else self._wrap(found, name, numbers),
            )
        try:
            yield
        finally:
            for module, name, found in saved:
                setattr(module, name, found)


def _failing_class(cls: type, failer: Failer, name: str, numbers: tuple[int, ...]) -> type:
    """A class whose making may fail, and that stands for the real one in every other way."""

    class Meta(type(cls)):
        def __call__(self, *args, **kwargs):
            return make(*args, **kwargs)

        def __instancecheck__(self, instance):
            return isinstance(instance, cls)

    make = failer._wrap(cls, name, numbers)
    return Meta(cls.__name__, (), {"__class_getitem__": classmethod(lambda _, item: cls)})
