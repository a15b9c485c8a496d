"""The thread that writes a process's Python stacks when another process asks for them by a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading

from ringcore.host.thread_stacks import thread_stacks

__all__ = ["HUNG_SIGNAL", "STACKS_ARMED", "STACKS_SIGNAL", "THREAD_NAME", "arm_stack_dumps"]

# No library uses these; SIGUSR1 and 2 belong to the user.
STACKS_SIGNAL = signal.SIGRTMIN + 3  # asks the thread, which needs the GIL
HUNG_SIGNAL = signal.SIGRTMIN + 4  # asks a handler in C, which does not; see `request_stacks`
STACKS_ARMED = b"armed\n"  # the file's first content: earlier, the signals would end the process
THREAD_NAME = "ringcore stacks"  # as the kernel has it too, in 15 bytes


def arm_stack_dumps(fd: int) -> None:
    """Has this process write its stacks to `fd`, a file in append mode, when it is asked. Call it before other threads
    start: they inherit the blocked signal, so that it is the thread's alone.

    A handler of `faulthandler` reads the frames of running threads without the GIL, and that ends a busy process within
    seconds at some hundred dumps a second. Hence only `HUNG_SIGNAL` has it. SIG_IGN below both: at interpreter exit the
    handler is removed before the process ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    for number in (STACKS_SIGNAL, HUNG_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_serve, args=(fd,), name=THREAD_NAME, daemon=True).start()
    faulthandler.register(HUNG_SIGNAL, file=fd, all_threads=True, chain=False)
    os.write(fd, STACKS_ARMED)


def _serve(fd: int) -> None:
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w") as comm:
        comm.write(THREAD_NAME)
    while True:
        signal.sigwait({STACKS_SIGNAL})
        with contextlib.suppress(OSError):  # without memory for it there is no answer, which the asker says
            os.write(fd, thread_stacks().encode(errors="replace"))
