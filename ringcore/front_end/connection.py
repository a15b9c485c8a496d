"""The client's handle of the engine process and of the channel to it."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator, Sequence

from ringcore.config import EngineConfig
from ringcore.engine_core.heartbeat import EngineWatchdog
from ringcore.engine_core.process import CHANNEL, ENTRY, STATUS, EngineStart
from ringcore.engine_core.transport.channel import ClientChannel, FrameLimits, Received, StreamClosed, channel_pair
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.status_board import StatusBoard, create_board
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.codec import encode_start
from ringcore.protocol.messages import ClientMessage, EngineMessage, Shutdown

__all__ = ["EngineConnection"]

_GRACEFUL_S = 10.0  # the engine gives its workers 5 s, then kills them
_SENDER_EXIT_S = 1.0
_EXIT_AFTER_CLOSE_S = 2.0  # the engine closes its end last, just before it exits
_MAX_STACK_CHARS = 16 << 10


class EngineConnection:
    """Starts an engine process. It holds no reference to the client, so that a dropped client can be finalized.

    `send` is thread-safe; `wait`, `messages` and `death` belong to one thread at a time.
    is_listening: whether the engine reads its socket; it does not while its workers start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.is_listening = False
        self.owner = OwnerProcess("the engine")
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peer_closed_s: float | None = None  # when the engine closed its end
        self._has_ended = False  # the process, as the last wait saw it
        ours, theirs = channel_pair()
        try:
            with theirs:
                board = self._start(config, theirs.fileno())
        except BaseException:
            os.close(self._wake_fd)
            ours.close()
            raise
        limits = FrameLimits.for_ranks(config.parallel.layout.world_size)
        self._channel = ClientChannel(ours, self._process.pidfd, self._wake_fd, limits)
        self._poll = select.poll()
        for fd in (self._channel.fileno(), self._process.pidfd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        timeout_s = config.parallel.engine_timeout_s
        self._watchdog = None if timeout_s is None else EngineWatchdog(self._process, board, timeout_s)

    def _start(self, config: EngineConfig, channel_fd: int) -> StatusBoard:
        status_fd = create_board(1)
        try:
            payload = encode_start(EngineStart(config))
            self._process = ChildProcess.start("engine", ENTRY, payload, {CHANNEL: channel_fd, STATUS: status_fd})
            return StatusBoard(status_fd, 1)
        finally:
            os.close(status_fd)

    def send(self, message: ClientMessage, buffers: Sequence[Buffer] = (), deadline: float | None = None) -> None:
        """See `ClientChannel.send`."""
        self._channel.send(message, buffers, deadline)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for a message, the death of the process, `wake`, or the timeout."""
        if self._peer_closed_s is not None:
            left_s = max(0.0, self._peer_closed_s + _EXIT_AFTER_CLOSE_S - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        ready = self._poll.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1e3))
        self._has_ended = any(fd == self._process.pidfd for fd, _ in ready)

    def wake(self) -> None:
        """Ends the wait of every thread, permanently."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def messages(self) -> Iterator[Received[EngineMessage]]:
        """Every message that has arrived. Raises `EngineDeadError` for bytes that are not a frame."""
        try:
            while (received := self._channel.receive()) is not None:
                yield received
        except StreamClosed:
            if self._peer_closed_s is None:
                self._peer_closed_s = time.monotonic()
                self._poll.unregister(self._channel.fileno())  # it stays readable

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def death(self) -> EngineDeadError | None:
        """The error with how the engine process ended, or that it closed its connection and did not exit."""
        if self._has_ended and not self._process.is_alive():
            return (self._watchdog and self._watchdog.killed_for) or self._process.dead_error()
        if self._peer_closed_s is not None and time.monotonic() - self._peer_closed_s >= _EXIT_AFTER_CLOSE_S:
            return EngineDeadError(
                f"the engine process (pid {self._process.pid}) closed its connection and did not exit; "
                f"it is {self._process.process_state()}",
                process="engine",
            )
        return None

    def describe_process(self) -> str:
        """The engine process's state and the stack of each thread, as text."""
        process = self._process
        state, stacks = process.process_state(), process.python_stacks()
        return f"the process 'engine' (pid {process.pid}) is {state}\n{stacks[:_MAX_STACK_CHARS]}"

    def close(self) -> None:
        """Ends the engine and frees its resources here; takes at most about 20 seconds. Idempotent.

        Does nothing in a process that was forked from the owner.
        """
        if self._wake_fd < 0 or not self.owner.is_here:
            return
        self.wake()
        if self._watchdog is not None:
            self._watchdog.stop()
        wake_fd, self._wake_fd = self._wake_fd, -1
        self._channel.shutdown_write(Shutdown(), _SENDER_EXIT_S)
        # An engine that does not read its socket gets SIGTERM at once.
        self._process.terminate(_GRACEFUL_S if self.is_listening else 0.0)
        self._channel.close()
        os.close(wake_fd)
