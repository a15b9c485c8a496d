"""Length-prefixed messages (u32 length, body) between a process and a child that executes jobs for it in order.

The child's first message reports that it is ready (an empty body), or the error of its start (as JSON). Then it answers
each job with one message, in order.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from ringcore.errors import RingcoreError, error_from_wire, error_to_wire

__all__ = ["LENGTH", "framed", "limit_memory", "serve_jobs", "start_error"]

LENGTH = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def start_error(body: bytes) -> RingcoreError | None:
    """The error in the first message; None for a child that is ready."""
    return error_from_wire(json.loads(body)) if body else None


def serve_jobs(channel: socket.socket, start: Callable[[], Callable[[bytes], bytes]]) -> None:
    """The child's loop, until the parent closes its end. `start` returns the function that executes a job; the child
    sends a `RingcoreError` that `start` raises in place of "ready"."""
    with channel:
        try:
            execute = start()
        except RingcoreError as error:
            channel.sendall(framed(json.dumps(error_to_wire(error)).encode()))
            return
        channel.sendall(framed(b""))
        with channel.makefile("rb") as jobs:
            while len(head := jobs.read(LENGTH.size)) == LENGTH.size:
                body = jobs.read(LENGTH.unpack(head)[0])
                channel.sendall(framed(execute(body)))


def limit_memory(max_bytes: int) -> None:
    """Limits this process to `max_bytes` more than it has mapped by now (RLIMIT_AS): libraries may have reserved
    address space that they never use."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + max_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
