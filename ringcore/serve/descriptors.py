"""The file descriptors of a service: how many connections they allow, and what is logged when accept() lacks one."""

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

__all__ = ["MAX_ACCEPTS_PER_TURN", "NUM_RESERVED", "count_accept_errors", "fit_connections", "raise_descriptor_limit"]

_log = logging.getLogger(__name__)

# asyncio accepts up to so many connections a turn of its loop, and closes an evicted one some turns later.
MAX_ACCEPTS_PER_TURN = 8
NUM_RESERVED = 32  # connections beyond max_connections, on which /health and /metrics are answered
_NUM_IN_FLIGHT = 4 * MAX_ACCEPTS_PER_TURN  # accepted and not counted yet, or evicted and not closed yet
_NUM_OWN = 64  # files, pipes to the engine and sockets that the process opens later
_SPARE = NUM_RESERVED + _NUM_IN_FLIGHT + _NUM_OWN

_LOG_PERIOD_S = 1.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # where asyncio tries again a second later


def raise_descriptor_limit() -> None:
    """The process's soft limit becomes its hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where that is more than the system allows, the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit_connections(max_connections: int) -> int:
    """As many of `max_connections` as the process has descriptors for. Raises `ConfigError` where that is none."""
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
    """Logs once a second that accept() lacks descriptors or memory, where asyncio writes a traceback for each try.

    Every other error goes where it went before.
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
