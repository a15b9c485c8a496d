"""The client's handle of the engine process and of the channel to it."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from ringcore.config import EngineConfig
from ringcore.engine_core.heartbeat import EngineWatchdog
from ringcore.engine_core.transport.channel import ClientChannel, FrameLimits, Received, StreamClosed
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError
from ringcore.executor.status_board import StatusBoard, note_owner
from ringcore.front_end.engine_ends import EngineEnds, start_engine_process
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.messages import ClientMessage, EngineMessage, Shutdown

__all__ = ["EngineConnection"]

_GRACEFUL_S = 10.0  # the engine gives its workers 5 s, then kills them
_SENDER_EXIT_S = 1.0
_EXIT_AFTER_CLOSE_S = 2.0  # the engine closes its end last, just before it exits
_MAX_STACK_CHARS = 16 << 10


class EngineConnection:
    """An engine process and the channel to it. It has no reference to the client, so that a dropped one is finalized.

    `send` is thread-safe; `wait`, `messages` and `death` belong to one thread at a time.
    is_listening: whether the engine reads its socket; it does not while its workers start.
    """

    def __init__(
        self, config: EngineConfig, ends: EngineEnds | None = None, *, can_be_handed_over: bool = False
    ) -> None:
        """ends: of a parked engine that was handed over, which this owns then; None starts an engine process.
        can_be_handed_over: see `hand_over`."""
        self.is_listening = False
        self.owner = OwnerProcess("the engine")
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peer_closed_s: float | None = None  # when the engine closed its end
        self._has_ended = False  # the process, as the last wait saw it
        try:
            ends = start_engine_process(config, can_be_handed_over) if ends is None else ends
        except BaseException:
            os.close(self._wake_fd)
            raise
        self._process, self._status_fd = ends.process, ends.status_fd
        ours = ends.channel
        limits = FrameLimits.for_ranks(config.parallel.layout.world_size)
        self._channel = ClientChannel(ours, self._process.pidfd, self._wake_fd, limits)
        self._poll = select.poll()
        for fd in (self._channel.fileno(), self._process.pidfd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        timeout_s = config.parallel.engine_timeout_s
        self._watchdog = (
            None if timeout_s is None else EngineWatchdog(self._process, StatusBoard(self._status_fd, 1), timeout_s)
        )

    def send(self, message: ClientMessage, buffers: Sequence[Buffer] = (), deadline: float | None = None) -> None:
        """See `ClientChannel.send`."""
        self._channel.send(message, buffers, deadline)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for a message, the death of the process, `wake`, or the timeout."""
        if self._peer_closed_s is not None:
            left_s = max(0.0, self._peer_closed_s + _EXIT_AFTER_CLOSE_S - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        if self._channel.reader.has_read_ahead:  # left by an interrupt
            timeout_s = 0.0
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
                if not self._channel.reader.may_have_more:
                    return
        except StreamClosed:
            if self._peer_closed_s is None:
                self._peer_closed_s = time.monotonic()
                self._poll.unregister(self._channel.fileno())  # it stays readable

    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def process_fd(self) -> int:
        return self._process.pidfd

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
        self._free(wake_fd)

    def _free(self, wake_fd: int) -> None:
        self._channel.close()
        os.close(self._status_fd)
        os.close(wake_fd)

    # -----------------------------------------------------------------------------------------------------------
    # Handing the engine over to another process.

    def hand_over(self, owner_pid: int, send: Callable[[int, list[int]], None], on_end: Callable[[], None]) -> None:
        """Gives the engine to another process; nothing of it is left here, and its client is of no more use.

        No request may be unfinished, and no call pending. send: gives that process the engine's pid and the descriptors
        of `EngineEnds.received`. If it raises, the engine has ended. on_end: called in a thread when the process ends.
        """
        handed = self._process.hand_over(owner_pid)
        try:
            note_owner(self._status_fd, owner_pid)
            send(self._process.pid, [*handed, self._channel.fileno(), self._status_fd])
        except BaseException:
            self._process.signal(signal.SIGKILL)
            self.close()
            raise
        finally:
            handed.close()
        self.wake()
        if self._watchdog is not None:
            self._watchdog.stop()
        wake_fd, self._wake_fd = self._wake_fd, -1
        self._process.release(on_end)
        self._free(wake_fd)
