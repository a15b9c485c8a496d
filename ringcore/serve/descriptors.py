"""File descriptor limits: how many connections they allow, and the log of accept() errors for lack of one."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress
from typing import Any

from ringcore.errors import ConfigError
from ringcore.serve.rate_limited_log import RateLimitedLog

__all__ = [
    "MAX_ACCEPTS",
    "NUM_RESERVED",
    "count_accept_errors",
    "fit_connections",
    "raise_descriptor_limit",
]

_log = logging.getLogger(__name__)

# asyncio accepts up to this many connections per loop iteration, and closes an evicted one some iterations later.
MAX_ACCEPTS = 8
NUM_RESERVED = 32  # connections beyond max_connections, for /health and /metrics
_NUM_IN_FLIGHT = 4 * MAX_ACCEPTS  # accepted and not counted yet, or evicted and not closed yet
_NUM_OWN = 64  # files, pipes to the engine and sockets that the process opens later
_SPARE = NUM_RESERVED + _NUM_IN_FLIGHT + _NUM_OWN

_LOG_PERIOD_S = 1.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # asyncio retries after a second


def raise_descriptor_limit() -> None:
    """Raises the process's soft limit to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # above the system's maximum: the limit is unchanged
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit_connections(max_connections: int) -> int:
    """`max_connections`, limited to the process's free descriptors. Raises `ConfigError` if there are none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    num_open = len(os.listdir("/proc/self/fd"))
    room = limit - num_open - _SPARE
    if room < 1:
        raise ConfigError(
            f"max_connections={max_connections}: RLIMIT_NOFILE={limit} leaves no descriptor for connections, since "
            f"{num_open} are open and {_SPARE} stay free; raise the hard limit (ulimit -Hn)",
            option="max_connections",
            value=max_connections,
        )
    return min(max_connections, room)


def count_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Logs once a second that accept() lacks descriptors or memory, in place of asyncio's traceback per attempt.

    Other errors go to the previous exception handler.
    """
    before, log = loop.get_exception_handler(), RateLimitedLog(_log, _LOG_PERIOD_S)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_RESOURCES and "socket" in context:
            log.warning(f"accept(): {error.strerror}; raise RLIMIT_NOFILE or lower max_connections")
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
