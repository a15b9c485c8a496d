"""The parent's side of the line protocol: one child process that can be asked, paused, measured and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ringcore.errors import RingcoreError

__all__ = ["ROOT", "BenchmarkError", "Driver", "is_alive"]

ROOT = Path(__file__).resolve().parent.parent
# Each engine runs with its own defaults for threads, whatever the shell that starts the benchmark has set.
_STRIPPED_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "VLLM_")
_LOG_TAIL_BYTES = 4000
_STOP_TIMEOUT_S = 2.0  # a process in the middle of a disk access stops after it


class BenchmarkError(RingcoreError):
    """A benchmark cannot go on: a wrong option, or a child that failed. The message ends with the child's log."""


class Driver:
    """A child that answers `benchmarks.peers.protocol` commands.

    Its standard error, and all that its libraries print, goes to an unnamed file whose end is shown in errors.
    It has a process group of its own, in the same terminal session: if this process dies while the child is stopped,
    the kernel wakes the group with SIGHUP, so a paused engine does not outlive its benchmark.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._buffer = b""
        self._deadline_s = 0.0
        self._descendants: set[psutil.Process] = set()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; a child inherits that, but no handler
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_STRIPPED_PREFIXES)}
        self.started_s = time.monotonic()
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=inherited | dict(env or {}),
            process_group=0,
        )
        self._pidfd = os.pidfd_open(self._child.pid)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def call(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        """The value of `command`. Raises `BenchmarkError` if it fails, the child ends, or `timeout_s` passes."""
        self.send(command, timeout_s, **arguments)
        return self.receive()

    def send(self, command: str, timeout_s: float, **arguments: Any) -> None:
        """Sends a command whose reply must be there within `timeout_s`; `replied` and `receive` take it."""
        assert self._child.stdin is not None
        self._deadline_s = time.monotonic() + timeout_s
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the child is gone; receive() says so, with its log
            self._child.stdin.write(line)
            self._child.stdin.flush()

    def replied(self, wait_s: float) -> bool:
        """Whether the reply has come, waiting at most `wait_s` for it. Raises like `call`."""
        assert self._child.stdout is not None
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        until_s = min(time.monotonic() + wait_s, self._deadline_s)
        while b"\n" not in self._buffer:
            ready = [fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)]
            if self._child.stdout.fileno() in ready:
                data = os.read(self._child.stdout.fileno(), 1 << 20)
                self._buffer += data
                if data:
                    continue
            if ready:  # end of file, or the child's death with nothing left to read
                raise self._failure("ended before it replied")
            if time.monotonic() >= self._deadline_s:
                raise self._failure("gave no reply in time; raise the benchmark's time limit or look at its log")
            if time.monotonic() >= until_s:
                return False
        return True

    def receive(self) -> Any:
        """The value of the command sent last. Raises like `call`."""
        while not self.replied(60.0):
            continue
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(f"raised {reply['error']}\n{reply['traceback']}")
        return reply["value"]

    def processes(self) -> list[psutil.Process]:
        """The child and everything it started that is alive, parents first."""
        try:
            root = psutil.Process(self._child.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._descendants.update(found)
        return found

    def pause(self) -> None:
        """Stops all its processes, so that an idle engine that spins costs the others nothing.

        Returns when they have stopped: one that is still about to when this process dies is not woken by the SIGHUP.
        """
        self._signal(signal.SIGSTOP)
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        while any(map(_runs, self.processes())) and time.monotonic() < until_s:
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Its turn: awake inside, stopped again after."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def close(self, timeout_s: float = 15.0) -> None:
        """Asks it to quit, then kills what is left of it. Idempotent."""
        if self._log.closed:
            return
        self.resume()
        with contextlib.suppress(BrokenPipeError):
            self.send("quit", timeout_s)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)
        for process in filter(is_alive, self._descendants):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        until_s = time.monotonic() + timeout_s
        while any(map(is_alive, self._descendants)) and time.monotonic() < until_s:
            time.sleep(0.01)
        os.close(self._pidfd)
        self._child.stdout.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _failure(self, what: str) -> BenchmarkError:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return BenchmarkError(f"{self.name} {what}\nthe end of its log:\n{tail or '(empty)'}", engine=self.name)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs or is stopped; one that has ended and waits to be reaped is not alive."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
