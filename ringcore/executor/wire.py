"""The two messages between an executor and its workers. Each is an envelope and a body.

CALL    msgpack [method, args, kwargs]   to every worker; every worker replies
STEP    `SchedulerOutput`                to every worker; rank 0 replies, others only with an error
reply   the value, or the error's wire form
"""

from __future__ import annotations

import struct

from ringcore.executor.ring_memory import RingCorruptError

__all__ = ["CALL", "CREATED", "STEP", "pack_call", "pack_reply", "unpack_call", "unpack_reply"]

CALL, STEP = 1, 2
CREATED = 0  # the id of a call that nobody sends: its reply says that the worker stands, or why not

_CALL = struct.Struct("<QB7x")  # call id, kind
_REPLY = struct.Struct("<QIBB2x")  # call id, rank, kind of the call, 1 for an error


def pack_call(call_id: int, kind: int) -> bytes:
    return _CALL.pack(call_id, kind)


def unpack_call(parts: list[memoryview]) -> tuple[int, int, memoryview]:
    """Call id, kind, body."""
    if len(parts) != 2 or len(parts[0]) != _CALL.size or (call := _CALL.unpack(parts[0]))[1] not in (CALL, STEP):
        raise RingCorruptError(f"a message of {len(parts)} parts is no call")
    return call[0], call[1], parts[1]


def pack_reply(call_id: int, rank: int, kind: int, is_error: bool) -> bytes:
    return _REPLY.pack(call_id, rank, kind, is_error)


def unpack_reply(parts: list[memoryview], rank: int) -> tuple[int, int, bool, memoryview]:
    """Call id, kind, whether the body is an error, body; checked to come from `rank`."""
    if len(parts) != 2 or len(parts[0]) != _REPLY.size or (reply := _REPLY.unpack(parts[0]))[1] != rank:
        raise RingCorruptError(f"a message of {len(parts)} parts is no reply of worker {rank}")
    return reply[0], reply[2], bool(reply[3]), parts[1]
