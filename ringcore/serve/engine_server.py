"""The HTTP server of `ringcore serve`: server and engine shut down together."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from ringcore.errors import RingcoreError
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.serve.server import HttpServer

__all__ = ["EngineServer"]

_log = logging.getLogger(__name__)

_INTERRUPTED = 128 + signal.SIGINT  # the shells' exit code for Ctrl-C


class EngineServer(HttpServer):
    """Serves until SIGTERM, Ctrl-C, or the death of the engine without a restart.

    Shutdown: `on_ending` is called, and for `delay_s` seconds all goes on, so that a load balancer that asks whether
    the service is ready can send its requests elsewhere. Then the server accepts no more connections, unfinished
    requests have `drain_s` seconds and are then aborted, and the engine is closed. A second signal ends the delay; a
    Ctrl-C after that does not wait. When a dead engine ends the service, its requests have failed already.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServingEngine,
        drain_s: float,
        delay_s: float = 0.0,
        on_ending: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._engine, self._drain_s, self._delay_s, self._on_ending = engine, drain_s, delay_s, on_ending
        self._end_s: float | None = None  # when the delay is over
        self._has_died = False

    @property
    def exit_code(self) -> int:
        """0 after an orderly shutdown; 1 if the engine died; 130 after a second Ctrl-C."""
        if self._has_died:
            return 1
        return _INTERRUPTED if self.force_exit else 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        watching = asyncio.create_task(self._end_with_engine())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _end_with_engine(self) -> None:
        error = await self._engine.wait_dead()
        if error is not None:
            self._has_died = self.should_exit = True
            _report(error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._engine.close(self._drain_s))
        try:
            await super().shutdown(sockets)
        finally:
            if self.force_exit:
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Like uvicorn's, but does not raise the signal again after shutdown, which would set the exit code."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        if self._end_s is None and self._delay_s:
            self._end_s = time.monotonic() + self._delay_s
        else:
            self.should_exit = True
        self._on_ending()

    async def on_tick(self, counter: int) -> bool:
        if self._end_s is not None and time.monotonic() >= self._end_s:
            self.should_exit = True
        return await super().on_tick(counter)


def _report(error: RingcoreError) -> None:
    """Logs the cause, with the last log lines of the process that died."""
    last_log = "".join(f"\n  {line}" for line in error.details.get("last_log") or [])
    _log.error("ringcore: the engine died, and the service ends: %s%s", error.message, last_log)
