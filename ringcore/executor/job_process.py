"""A child process that executes one job after another, so that the caller can kill a job that takes too long."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping

from ringcore.executor.child_process import ChildProcess
from ringcore.protocol.job_channel import LENGTH, framed, start_error

__all__ = ["JobProcess", "reap"]

_BYTES_PER_READ = 1 << 16


class JobProcess:
    """The parent's end of `protocol.job_channel`. Non-blocking; not thread-safe.

    `child` is the process, `channel` the socket to poll: for reading, and for writing while `has_backlog`.
    """

    def __init__(
        self, name: str, entry: str, payload: bytes, channel_name: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts `entry` with `payload` and, as the descriptor `channel_name`, its end of the socket; `env` updates
        this process's environment. Raises `RingcoreError` if the process cannot be started."""
        self.channel, theirs = socket.socketpair()
        with theirs:
            try:
                self.child = ChildProcess.start(name, entry, payload, {channel_name: theirs.fileno()}, env)
            except BaseException:
                self.channel.close()
                raise
        self.channel.setblocking(False)
        self.is_ready = False
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def has_backlog(self) -> bool:
        return bool(self._unsent)

    def send(self, body: bytes) -> None:
        """Appends a job to the backlog and writes what the socket accepts."""
        assert self.is_ready
        self._unsent += framed(body)
        self.write()

    def write(self) -> None:
        """Writes what the socket accepts of the backlog. A closed other end is noticed by the death of `child`."""
        while self._unsent:
            try:
                del self._unsent[: self.channel.send(self._unsent)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()

    def poll_ready(self) -> bool:
        """Whether it is ready for jobs. Raises the error that it reported instead."""
        if not self.is_ready and (body := self._read()) is not None:
            error = start_error(body)
            if error is not None:
                raise error
            self.is_ready = True
        return self.is_ready

    def poll_answer(self) -> bytes | None:
        """The answer to the oldest job, if it has arrived in full."""
        assert self.is_ready
        return self._read()

    def _read(self) -> bytes | None:
        try:
            while data := self.channel.recv(_BYTES_PER_READ):
                self._received += data
        except (BlockingIOError, ConnectionResetError):
            pass
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        body = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return body

    def kill(self) -> ChildProcess:
        """Kills the process without waiting for its end; returns the child, for the caller to reap by `terminate`."""
        self.channel.close()
        self.child.signal(signal.SIGKILL)
        return self.child


def reap(killed: list[ChildProcess]) -> None:
    """Frees and removes the children in `killed` that have ended; never waits."""
    for child in [child for child in killed if not child.is_alive()]:
        child.terminate()
        killed.remove(child)
