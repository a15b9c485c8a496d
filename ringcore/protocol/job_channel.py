"""Messages between a process and a child that executes one job after another for it: a length (u32), then the body.

The child's first message says that it is ready (an empty body), or why it never will be (an error as JSON). After that
it answers each job with one message, in order.
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
    """What the first message says: None for a child that is ready."""
    return error_from_wire(json.loads(body)) if body else None


def serve_jobs(channel: socket.socket, start: Callable[[], Callable[[bytes], bytes]]) -> None:
    """The child's loop, until the parent closes its end. `start` prepares and returns what executes a job; a
    `RingcoreError` that it raises is told instead of "ready"."""
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
    """Lets this process map `max_bytes` more than it has mapped by now (RLIMIT_AS): a library may have reserved address
    space that it never uses."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + max_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
