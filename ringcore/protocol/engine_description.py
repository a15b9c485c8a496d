"""What an engine process says of itself without being asked: the engine may be starting, or hang."""

from __future__ import annotations

import msgspec

__all__ = ["EngineDescription"]


class EngineDescription(msgspec.Struct, frozen=True):
    """engine_id: 8 hexadecimal digits. pid: of the engine process, in its own pid namespace. owner_pid: likewise of the
    service or program that started it.

    started_s: when the process started; monotonic seconds, which all processes of a host share. status_fd: the engine's
    descriptor of its status line (`engine_core.heartbeat`). admin_endpoint: its TCP address, if it has one.
    """

    engine_id: str
    pid: int
    model: str
    executor: str
    device: str  # the option: "auto" is resolved by the workers
    num_ranks: int
    started_s: float
    status_fd: int
    admin_endpoint: str | None = None
    owner_pid: int | None = None
