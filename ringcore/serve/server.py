"""uvicorn as configured for `ringcore serve`, with the service's connection limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from ringcore.serve.access_log import leave_out_polls
from ringcore.serve.connections import Connections
from ringcore.serve.descriptors import MAX_ACCEPTS, count_accept_errors
from ringcore.serve.http_protocol import HttpProtocol
from ringcore.serve.options import ServiceOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["HttpServer", "http_config"]

_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """A server with a long listen backlog in the kernel, which accepts few connections per iteration of the loop.

    asyncio uses one number for both: the length of the backlog, and the number of accept() calls per iteration, also
    when accept() fails for lack of descriptors. The config's `backlog` is the second; `startup` sets the first.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_BACKLOG)
        count_accept_errors(asyncio.get_running_loop())


def http_config(app: ASGIApp, options: ServiceOptions, **settings: Any) -> uvicorn.Config:
    """settings: further settings of uvicorn."""
    connections = Connections(options.max_connections, options.max_connections_per_peer)
    protocol = partial(HttpProtocol, connections=connections, options=options)
    leave_out_polls(logging.getLogger("uvicorn.access"))
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        lifespan="off",
        backlog=MAX_ACCEPTS,
        server_header=False,
        timeout_keep_alive=cast("int", options.keep_alive_timeout_s),  # a float works: uvicorn passes it to call_later
        **settings,
    )
