"""The two messages between an executor and its workers. Each is an envelope and the buffers of a value.

CALL      request, its method a name                 to every worker; each replies, or the one that was asked to
CALLABLE  request, its method a packed function      likewise
STEP      `SchedulerOutput`                          to every worker; rank 0 replies, others only with an error
reply     the value's buffers, or the error's wire form

Requests and values are those of `value_codec`. A CALL of a read-only method goes by a queue of its own, which each
worker's side thread reads; its reply comes back by the same queue as all others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ringcore.executor.ring_memory import RingCorruptError

__all__ = [
    "CALL",
    "CALLABLE",
    "CREATED",
    "STEP",
    "STEP_METHOD",
    "CallHead",
    "pack_call",
    "pack_reply",
    "unpack_call",
    "unpack_reply",
]

CALL, STEP, CALLABLE = 1, 2, 3
CREATED = 0  # the id of a call that nobody sends: its reply has the worker's read-only methods, or why there is none
STEP_METHOD = "execute_model"

_CALL = struct.Struct("<QBxxxI")  # call id, kind, 1 + the one rank that replies (0: all do); then the method's name
_REPLY = struct.Struct("<QIBB2x")  # call id, rank, kind of the call, 1 for an error
_MAX_NAME_BYTES = 200


class CallHead(NamedTuple):
    """What a call's envelope says. `method` is the name in the request; a function's is for people alone."""

    call_id: int
    kind: int
    unique_reply_rank: int | None
    method: str


def pack_call(call_id: int, kind: int, method: str = "", unique_reply_rank: int | None = None) -> bytes:
    head = _CALL.pack(call_id, kind, 0 if unique_reply_rank is None else 1 + unique_reply_rank)
    return head + method.encode(errors="replace")[:_MAX_NAME_BYTES] if method else head


def unpack_call(parts: Sequence[memoryview]) -> tuple[CallHead, Sequence[memoryview]]:
    """The envelope, and the request's buffers."""
    if len(parts) < 2 or not _CALL.size <= len(parts[0]) <= _CALL.size + _MAX_NAME_BYTES:
        raise RingCorruptError(f"a message of {len(parts)} parts is no call")
    call_id, kind, replying = _CALL.unpack_from(parts[0])
    if kind not in (CALL, STEP, CALLABLE):
        raise RingCorruptError(f"a call of kind {kind} is none")
    name = STEP_METHOD if kind == STEP else bytes(parts[0][_CALL.size :]).decode(errors="replace")
    return CallHead(call_id, kind, replying - 1 if replying else None, name), parts[1:]


def pack_reply(call_id: int, rank: int, kind: int, is_error: bool) -> bytes:
    return _REPLY.pack(call_id, rank, kind, is_error)


def unpack_reply(parts: Sequence[memoryview], rank: int) -> tuple[int, int, bool, Sequence[memoryview]]:
    """Call id, kind, whether it is an error, its buffers; checked to come from `rank`."""
    if len(parts) < 2 or len(parts[0]) != _REPLY.size or (reply := _REPLY.unpack(parts[0]))[1] != rank:
        raise RingCorruptError(f"a message of {len(parts)} parts is no reply of worker {rank}")
    return reply[0], reply[2], bool(reply[3]), parts[1:]
