"""Framing of the messages between an executor and its workers. Each is a value's buffers, with a header in the first.

CALL      request, its method a name                 to every worker; each replies, or `unique_reply_rank` only
CALLABLE  request, its method a packed function      likewise
STEP      `SchedulerOutput`                          to every worker; the output rank replies, others only with an error
reply     the value's buffers, or the error's wire form

Requests and values are those of `value_codec`. A call has a flag that the engine itself makes it: only then may it name
an engine method (`@rpc(scope="engine")`). A CALL of a read-only method goes by the control channel, which each worker's
control thread reads; its reply comes back by the same queue as all others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ringcore.executor.ring_buffer import Buffer
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
    "pack_step",
    "unpack_call",
    "unpack_reply",
]

CALL, STEP, CALLABLE = 1, 2, 3
CREATED = 0  # the id of a worker's first reply, which answers no call: a `WorkerCreated`, or the error of its creation
STEP_METHOD = "execute_model"

# call id, kind, 1 if the engine makes it, bytes of the method's name (it follows), 1 + the one rank that replies
_CALL = struct.Struct("<QBBHI")
_REPLY = struct.Struct("<QIBB2x")  # call id, rank, kind of the call, 1 for an error
_MAX_NAME_BYTES = 200


class CallHead(NamedTuple):
    """A call's header. `method` is the name in the request; for a function only a label."""

    call_id: int
    kind: int
    unique_reply_rank: int | None
    method: str
    by_engine: bool = False


def pack_call(head: CallHead, request: Sequence[Buffer]) -> list[Buffer]:
    """The message of a call: one part, plus the request's buffers after its body."""
    name = head.method.encode(errors="replace")[:_MAX_NAME_BYTES]
    replying = 0 if head.unique_reply_rank is None else 1 + head.unique_reply_rank
    packed = _CALL.pack(head.call_id, head.kind, head.by_engine, len(name), replying)
    return [b"".join((packed, name, request[0])), *request[1:]]


def pack_step(call_id: int, body: Buffer) -> list[Buffer]:
    """The message of a step."""
    return [b"".join((_CALL.pack(call_id, STEP, False, 0, 0), body))]


def unpack_call(parts: Sequence[memoryview]) -> tuple[CallHead, list[memoryview]]:
    """The header, and the request's buffers."""
    if not parts or len(parts[0]) < _CALL.size:
        raise RingCorruptError(f"a message of {len(parts)} parts is no call")
    call_id, kind, by_engine, name_bytes, replying = _CALL.unpack_from(parts[0])
    begin = _CALL.size + name_bytes
    if kind not in (CALL, STEP, CALLABLE) or name_bytes > _MAX_NAME_BYTES or begin > len(parts[0]):
        raise RingCorruptError(f"a call of kind {kind} with a name of {name_bytes} bytes is none")
    name = STEP_METHOD if kind == STEP else bytes(parts[0][_CALL.size : begin]).decode(errors="replace")
    head = CallHead(call_id, kind, replying - 1 if replying else None, name, by_engine == 1)
    return head, [parts[0][begin:], *parts[1:]]


def pack_reply(call_id: int, rank: int, kind: int, is_error: bool, reply: Sequence[Buffer]) -> list[Buffer]:
    return [b"".join((_REPLY.pack(call_id, rank, kind, is_error), reply[0])), *reply[1:]]


def unpack_reply(parts: Sequence[memoryview], rank: int) -> tuple[int, int, bool, list[memoryview]]:
    """Call id, kind, whether it is an error, its buffers; checks that it comes from `rank`."""
    if not parts or len(parts[0]) < _REPLY.size or (reply := _REPLY.unpack_from(parts[0]))[1] != rank:
        raise RingCorruptError(f"a message of {len(parts)} parts is no reply of worker {rank}")
    return reply[0], reply[2], bool(reply[3]), [parts[0][_REPLY.size :], *parts[1:]]
