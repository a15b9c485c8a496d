"""What `AdminClient` asks of its connection to an engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.messages import RpcCall, RpcResult

__all__ = ["AdminConnection"]


class AdminConnection(ABC):
    """It never reconnects: when it ends, the engine has most likely ended too.

    It holds no reference to the client, so that a dropped client can be finalized. `send` and `receive` belong to one
    thread at a time. Once the connection has ended, each raises why.

    shown: the engine, as errors name it.
    """

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.owner = OwnerProcess("the admin client")
        self._dead: RingcoreError | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @abstractmethod
    def wait_connected(self, timeout_s: float) -> bool:
        """Waits until the engine and this client know each other; False after `timeout_s` seconds. Raises the error
        that ended the attempt."""

    @abstractmethod
    def send(self, call: RpcCall, parts: Sequence[Buffer], deadline: float) -> bool:
        """Sends a call; False if it could not be sent before the deadline (monotonic seconds). Raises
        `InvalidRequestError` for one that is too large."""

    @abstractmethod
    def receive(self, call_id: int, deadline: float) -> tuple[RpcResult, Sequence[Buffer]] | None:
        """The answer to a call; None at the deadline. Drops late answers to earlier calls that timed out."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Frees the connection's resources. Called once."""

    def cancel_wait(self) -> None:
        """Wakes the waiting thread, whose call then raises `EngineDeadError`."""
        self._dead = self._dead or EngineDeadError("the admin client was closed", process="engine")
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Idempotent. Does nothing in a process that was forked from this one."""
        if not self.owner.is_here:
            return
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            self._disconnect()
            os.close(wake_fd)

    def _check(self) -> None:
        """Raises if the connection has ended: a fresh copy, since a traceback belongs to one raise."""
        if self._dead is not None:
            raise type(self._dead)(self._dead.message, **self._dead.details)

    def _ended(self, how: str) -> EngineDeadError:
        return EngineDeadError(f"the engine at {self.shown} {how}", process="engine")

    def _unreadable(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(f"the engine sent an unreadable message: {error}", process="engine")
