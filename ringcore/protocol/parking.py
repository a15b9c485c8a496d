"""What a program that keeps parked engines and a program that wants one say to each other: see `front_end.parking`.

    wants one                     keeps them
    connects             ───────▶
                         ◀─────── ParkOffer
    TAKE                 ───────▶
                         ◀─────── HandOver, with the descriptors of the engine process; or NoneParked

Or it says STOP, or nothing and hangs up. Each is one message of a SOCK_SEQPACKET socket.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringcore.protocol.messages import EngineReady

__all__ = ["MAX_BYTES", "STOP", "TAKE", "HandOver", "NoneParked", "ParkAnswer", "ParkOffer", "ParkedKey"]

TAKE, STOP = b"take", b"stop"
MAX_BYTES = 1 << 20


class ParkedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal for an engine to be another program's: the resolved options by part, the model's fingerprint,
    the code, and what processes inherit."""

    options: dict[str, dict[str, Any]]
    model: bytes
    versions: dict[str, str]
    environment: dict[str, str]


class ParkOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pids: of the processes of each parked engine, by name. level: of their sleep. error: of the last start that
    failed, until one succeeds."""

    pid: int
    model: str
    level: int
    keep: int
    pids: list[dict[str, int]]
    key: ParkedKey
    error: str | None = None


class HandOver(msgspec.Struct, frozen=True, tag="hand_over", forbid_unknown_fields=True):
    """The engine process is the receiver's from now on. ready: what it reported when it had started."""

    pid: int
    level: int
    ready: EngineReady


class NoneParked(msgspec.Struct, frozen=True, tag="none", forbid_unknown_fields=True):
    reason: str


ParkAnswer = HandOver | NoneParked
