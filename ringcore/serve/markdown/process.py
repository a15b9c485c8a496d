"""The process in which texts become nodes: a text may be adversarial, and a lexer's regular expressions may backtrack.

`renderer` kills it if a job exceeds its deadline, and its memory is limited.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Sequence

import msgspec

from ringcore.protocol.job_channel import limit_memory, serve_jobs

__all__ = ["CHANNEL", "ENTRY", "MAX_MEMORY_BYTES", "main"]

ENTRY = "ringcore.serve.markdown.process:main"
CHANNEL = "markdown"  # the name of the inherited socket
MAX_MEMORY_BYTES = 512 << 20  # above the memory of the ready process
_NICENESS = 5  # below the engine and the service


def main(payload: bytes, fds: dict[str, int]) -> None:
    """A job is a JSON list of texts; its answer is JSON: a list of blocks for each."""
    assert payload == b""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of a crash that a text caused
    os.nice(_NICENESS)

    def start() -> Callable[[bytes], bytes]:
        from ringcore.serve.markdown.nodes import Block, blocks_of

        limit_memory(MAX_MEMORY_BYTES)
        decoder = msgspec.json.Decoder(list[str])

        def execute(body: bytes) -> bytes:
            found: Sequence[Sequence[Block]] = [blocks_of(text) for text in decoder.decode(body)]
            return msgspec.json.encode(found)

        return execute

    serve_jobs(socket.socket(fileno=fds[CHANNEL]), start)
