"""What the children of test_child_process do. Imports little: every child imports it."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path

from ringcore.executor.child_process import ChildProcess
from ringcore.host.log_forwarding import FORWARDED


def talk(payload: bytes, fds: dict[str, int]) -> None:
    print(f"got {payload!r}", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    os.write(fds["out"], b"%d %s" % (os.getppid(), os.environ["RINGCORE_TEST"].encode()))


def leave(payload: bytes, fds: dict[str, int]) -> None:
    raise SystemExit(int(payload))


def fail(payload: bytes, fds: dict[str, int]) -> None:
    raise ZeroDivisionError("as asked")


def many_lines(payload: bytes, fds: dict[str, int]) -> None:
    for i in range(1000):
        print(f"line {i}")
    print("x" * 50000)
    print("end without newline", end="", flush=True)


def wait_for_end(payload: bytes, fds: dict[str, int]) -> None:
    """Leaves when its descriptor says so."""
    os.write(fds["out"], b"up")
    os.read(fds["in"], 1)


def refuse_to_end(payload: bytes, fds: dict[str, int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fds["out"], b"up")
    threading.Event().wait()


def stand_still(payload: bytes, fds: dict[str, int]) -> None:
    """Two threads that can be told apart."""
    threading.Thread(target=_wait_on_the_side, daemon=True).start()
    os.write(fds["out"], b"up")
    threading.Event().wait()


def _wait_on_the_side() -> None:
    threading.Event().wait()


def list_fds(payload: bytes, fds: dict[str, int]) -> None:
    names = {fd: name for name, fd in fds.items()}
    is_private = all(not os.get_inheritable(fd) for fd in fds.values())
    found = sorted(names.get(int(fd), fd) for fd in os.listdir("/proc/self/fd"))
    Path(payload.decode()).write_text(f"{is_private} {signal.getsignal(signal.SIGINT).name} {' '.join(found)}")


def hold_the_gil(payload: bytes, fds: dict[str, int]) -> None:
    os.write(fds["out"], b"up")
    re.match("(a+)+$", "a" * 64 + "b")  # takes for ever, in C, and never lets go of the GIL


def logs(payload: bytes, fds: dict[str, int]) -> None:
    """Logs at every level, and writes lines that are no records."""
    log = logging.getLogger("ringcore.worker.worker")
    log.debug("in detail")
    log.info("on its way")
    log.warning("%d of %s", 3, "four", extra={"request_id": "r-1"})
    print("plain text", flush=True)
    try:
        raise ZeroDivisionError("as asked")
    except ZeroDivisionError:
        log.exception("two\nlines")
    logging.getLogger("other").warning("of another library")
    os.write(2, FORWARDED + b'{"name": "ringcore", "levelno"\n')
    os.write(2, FORWARDED + b"[1]\n")
    log.error("é" * 100_000)  # each is six bytes of JSON: more than a pipe holds


def logs_in_a_child(payload: bytes, fds: dict[str, int]) -> None:
    """Its own child, "worker 1", logs."""
    child = ChildProcess.start("worker 1", "child_entries:logs")
    assert child.wait(60)
    child.terminate()
    logging.getLogger("ringcore.engine_core.loop").warning("the engine's own")


def run_hard(payload: bytes, fds: dict[str, int]) -> None:
    """Threads whose frames come and go."""

    def count(depth: int) -> int:
        return sum(count(depth - 1) for _ in range(2)) if depth else 1

    def forever() -> None:
        while True:
            count(9)

    for _ in range(3):
        threading.Thread(target=forever, daemon=True).start()
    os.write(fds["out"], b"up")
    forever()
