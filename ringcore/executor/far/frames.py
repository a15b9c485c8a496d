"""What travels between two hosts: frames with a fixed head, and notes, which are typed msgpack. Nothing is unpickled.

    kind      position              size              body
    --------  --------------------  ----------------  ---------------------------------------------------------------
    PART      of the message        of all its parts  the next piece of the message: bytes of `message_queue.layout`
    RELEASED  of the reader, announced
    CLOSED    the writer's head                       no message follows
    LEFT                                              the reader reads no more
    NOTE                                              a `Note`, of no channel

ZeroMQ keeps frames whole and in order, CurveZMQ authentic. A frame that is none ends the connection.
"""

from __future__ import annotations

import struct
from importlib.metadata import PackageNotFoundError, version

import msgspec

from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.requests import WireError

__all__ = [
    "CLOSED",
    "HEAD_BYTES",
    "LEFT",
    "NOTE",
    "PART",
    "PIECE_BYTES",
    "RELEASED",
    "AskStacks",
    "Finish",
    "Join",
    "Note",
    "Refuse",
    "Signal",
    "Stacks",
    "StartWorkers",
    "Started",
    "Status",
    "WorkerEnded",
    "installed_version",
    "pack_head",
    "pack_note",
    "unpack_head",
    "unpack_note",
]

PROTOCOL = 1
PART, RELEASED, CLOSED, LEFT, NOTE = range(1, 6)
PIECE_BYTES = 1 << 20  # a heartbeat waits for one piece at most
_HEAD = struct.Struct("<BBHIQQ")  # kind, protocol, channel, 0, position, size
HEAD_BYTES = _HEAD.size


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host offers to run workers. rendezvous_port: a port where its rank 0 may listen."""

    host: str
    version: str  # of ringcore: both sides must have the same
    rendezvous_port: int = 0


class Refuse(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    reason: str


class StartWorkers(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """start: a `HostStart`, encoded."""

    start: bytes


class Started(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The pids of the workers, or why there are none."""

    pids: list[int]
    error: WireError | None = None


class Status(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The status board of the host, and each worker's process state. now_ns: on the host's clock, that of the lines."""

    now_ns: int
    lines: bytes
    states: list[str]


class WorkerEnded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """index: among the host's workers."""

    index: int
    how: str
    exit_code: int | None
    signal: str | None
    last_log: list[str]


class Signal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    index: int
    number: int


class AskStacks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    index: int


class Stacks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    index: int
    text: str


class Finish(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """These workers are no longer needed. The host answers with the same, and may join again: the engine may start new
    ones."""


def installed_version() -> str:
    """Of ringcore, on this host."""
    try:
        return version("ringcore")
    except PackageNotFoundError:  # a copy of the source
        return "of no version"


Note = Join | Refuse | StartWorkers | Started | Status | WorkerEnded | Signal | AskStacks | Stacks | Finish

_encoder, _decoder = encoder(), decoder(Note)


def pack_head(kind: int, channel: int, position: int = 0, size: int = 0) -> bytes:
    return _HEAD.pack(kind, PROTOCOL, channel, 0, position, size)


def unpack_head(frame: Buffer) -> tuple[int, int, int, int]:
    """Kind, channel, position, size. Raises `RingCorruptError`."""
    if len(frame) < HEAD_BYTES:
        raise RingCorruptError(f"a frame of {len(frame)} bytes is none")
    kind, protocol, channel, _, position, size = _HEAD.unpack_from(frame)
    if protocol != PROTOCOL:
        raise RingCorruptError(f"a frame of protocol {protocol}; this is {PROTOCOL}: run one version on all hosts")
    return kind, channel, position, size


def pack_note(note: Note) -> bytes:
    return pack_head(NOTE, 0) + _encoder.encode(note)


def unpack_note(frame: Buffer) -> Note:
    """Raises `RingCorruptError`."""
    try:
        note: Note = _decoder.decode(memoryview(frame)[HEAD_BYTES:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise RingCorruptError(f"a note between hosts cannot be read: {error}") from error
    return note
