"""What `AdminEndpoint` asks of a way in: it authenticates clients, and carries the frames of their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from ringcore.config.admin_keys import KnownClient
from ringcore.engine_core.transport.framing import MAX_BUFFERS_PER_RANK, Buffer, FrameLimits

__all__ = ["ADMIN_LIMITS", "MAX_CALLS_IN_FLIGHT", "AdminListener", "Incoming", "admin_limits"]

ADMIN_LIMITS = FrameLimits(message_bytes=1 << 20, buffer_bytes=64 << 20, num_buffers=MAX_BUFFERS_PER_RANK)
MAX_CALLS_IN_FLIGHT = 64  # per client, over all its connections


class Incoming(NamedTuple):
    """What an authenticated client sent. identity: its connection, which gets the reply."""

    identity: bytes
    client: KnownClient
    frames: list[memoryview]  # a message, and its buffers


class AdminListener(ABC):
    """A server socket. One thread at a time; only `close` blocks.

    address: where clients connect, for `EngineReady.admin_endpoint`; None for a socket that they find without it.
    """

    address: str | None = None
    is_edge_triggered: ClassVar[bool] = False  # whether its descriptor may not signal messages that have arrived

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `receive` has something to do: messages, or unsent replies."""

    @property
    def has_messages(self) -> bool:
        """Whether the descriptor will not signal messages that have arrived: then the caller must not poll."""
        return False

    @property
    @abstractmethod
    def num_rejected(self) -> int:
        """Connections that were refused."""

    @abstractmethod
    def receive(self) -> Incoming | None:
        """The next message; None if none has arrived. Raises `FrameError` for one that cannot be read, whose connection
        it may have closed."""

    @abstractmethod
    def send(self, identity: bytes, message: bytes, buffers: Sequence[Buffer]) -> str | None:
        """Sends a reply, whose buffers must not be changed afterwards; never blocks. The reason if it was lost instead:
        the client is gone, or does not read."""

    @abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket after at most `linger_s` seconds to send the pending replies. Idempotent."""


def admin_limits(num_ranks: int) -> FrameLimits:
    """The limits of calls and replies of an engine with that many ranks."""
    return FrameLimits(ADMIN_LIMITS.message_bytes, ADMIN_LIMITS.buffer_bytes, ADMIN_LIMITS.num_buffers * num_ranks)
