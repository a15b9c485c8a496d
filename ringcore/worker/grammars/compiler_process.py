"""The process that compiles every new grammar first: what a grammar can do to whoever compiles it, it does here.

It takes one grammar after the other from a socket and answers each. Both are a length (u32) and JSON. The first message
that it sends says that it is ready, or why it never will be.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, RingcoreError, error_to_wire
from ringcore.protocol.codec import decoder
from ringcore.structured_outputs import StructuredOutputsParams
from ringcore.worker.grammars.grammars import Grammars, model_grammars

__all__ = ["CHANNEL", "ENTRY", "LENGTH", "main", "request_bytes"]

ENTRY = "ringcore.worker.grammars.compiler_process:main"
CHANNEL = "grammars"  # the name of the inherited socket
LENGTH = struct.Struct("<I")
MAX_MEMORY_BYTES = 1 << 30  # for all grammars, above what the process has when it is ready
# Of the thread that compiles, half of what a worker's has: what is nested too deeply for that one ends this process.
_STACK_BYTES = 4 << 20


def main(payload: bytes, fds: dict[str, int]) -> None:
    config: EngineConfig = decoder(EngineConfig).decode(payload)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is no news
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(config, socket.socket(fileno=fds[CHANNEL])), name="compiler")
    thread.start()
    thread.join()


def _serve(config: EngineConfig, channel: socket.socket) -> None:
    grammars = model_grammars(config)
    try:
        grammars.load()
        _limit_memory()
    except RingcoreError as error:
        _send(channel, error_to_wire(error))
        return
    _send(channel, None)
    with channel, channel.makefile("rb") as requests:
        while len(head := requests.read(LENGTH.size)) == LENGTH.size:
            body = requests.read(LENGTH.unpack(head)[0])
            _send(channel, _compile(grammars, StructuredOutputsParams(**json.loads(body))))


def _compile(grammars: Grammars, spec: StructuredOutputsParams) -> dict[str, Any] | None:
    """The error as builtins, if there is one."""
    try:
        grammars.compile(spec)
    except InvalidRequestError as error:
        return error_to_wire(error)
    return None


def _limit_memory() -> None:
    """What is mapped by now stays, however much that is: a library may reserve more than it ever uses."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _send(channel: socket.socket, error: dict[str, Any] | None) -> None:
    body = json.dumps(error).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def request_bytes(spec: StructuredOutputsParams) -> bytes:
    """A grammar as the process takes it."""
    body = json.dumps(asdict(spec)).encode()
    return LENGTH.pack(len(body)) + body
