"""The grammar compiler process: compiles every new grammar first, so that a hostile grammar can harm only this process.

It serves one compile job at a time; jobs and replies are JSON: see `protocol.job_channel`.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, error_to_wire
from ringcore.grammars.grammars import Grammars, model_grammars
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.codec import decoder
from ringcore.protocol.job_channel import limit_memory, serve_jobs

__all__ = ["CHANNEL", "ENTRY", "encode_job", "main"]

ENTRY = "ringcore.grammars.compiler_process:main"
CHANNEL = "grammars"  # the name of the inherited socket
MAX_MEMORY_BYTES = 1 << 30  # for all grammars, above the process's memory when it is ready
# Of the compiling thread: half of a worker's, so that too deep a nesting crashes this process before a worker.
_STACK_BYTES = 4 << 20


def main(payload: bytes, fds: dict[str, int]) -> None:
    config: EngineConfig = decoder(EngineConfig).decode(payload)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here: no core dumps
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(socket.socket(fileno=fds[CHANNEL]), config), name="compiler")
    thread.start()
    thread.join()


def _serve(channel: socket.socket, config: EngineConfig) -> None:
    def start() -> Callable[[bytes], bytes]:
        grammars = model_grammars(config)
        grammars.load()
        limit_memory(MAX_MEMORY_BYTES)
        return partial(_compile, grammars)

    serve_jobs(channel, start)


def _compile(grammars: Grammars, job: bytes) -> bytes:
    """-> the error as JSON, or null."""
    error: dict[str, Any] | None = None
    try:
        grammars.compile(StructuredOutputsParams(**json.loads(job)))
    except InvalidRequestError as refusal:
        error = error_to_wire(refusal)
    return json.dumps(error).encode()


def encode_job(spec: StructuredOutputsParams) -> bytes:
    """The compile job of a grammar."""
    return json.dumps(asdict(spec)).encode()
