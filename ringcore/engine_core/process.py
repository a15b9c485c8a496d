"""The engine process: its entry point and life cycle.

Most of the engine is imported while the workers' processes start: so a client, which takes a few names from here, does
not import it either.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.heartbeat import start_heartbeat
from ringcore.engine_core.transport.channel import EngineChannel, FrameLimits
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor import executor_class
from ringcore.executor.status_board import StatusLine
from ringcore.protocol.codec import decoder
from ringcore.protocol.messages import EngineDead, EngineRecovering
from ringcore.protocol.wire_errors import wire_error, wire_without_details

if TYPE_CHECKING:
    from ringcore.engine_core.admin.endpoint import AdminEndpoint
    from ringcore.engine_core.core import EngineCore
    from ringcore.engine_core.loop import EngineLoop
    from ringcore.executor.base import Executor

__all__ = ["CHANNEL", "ENTRY", "STATUS", "EngineStart", "main"]

ENTRY = "ringcore.engine_core.process:main"
CHANNEL, STATUS = "channel", "status"  # names of the inherited descriptors: the socket, and the page of `heartbeat`
_CLOSE_LINGER_S = 1.0
_log = logging.getLogger(__name__)
_FLUSH_TIMEOUT_S = 0.2
_RAISED_AGAIN_S = 0.001


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload that the client passes to the engine process."""

    config: EngineConfig


class _Terminated(BaseException):
    """SIGTERM arrived. The signal handler raises it, so that it interrupts start-up as promptly as the loop."""


def main(payload: bytes, fds: dict[str, int]) -> None:
    """Exit code 1 if the engine failed to start, or died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the front end handles it
    sys.unraisablehook = _raise_again
    _set_handlers(_raise_terminated)
    start: EngineStart = decoder(EngineStart).decode(payload)
    status = StatusLine(fds[STATUS], 0)
    start_heartbeat(status, start.config.parallel.engine_timeout_s)
    channel = EngineChannel(fds[CHANNEL], FrameLimits.for_ranks(start.config.parallel.layout.world_size))
    admin: AdminEndpoint | None = None
    executor: Executor | None = None
    core: EngineCore | None = None
    loop: EngineLoop | None = None

    def announce_recovery(recovering: EngineRecovering) -> None:
        if loop is None:
            channel.send(recovering)
        else:
            loop.announce_recovery(recovering)

    try:
        executor = executor_class(start.config.parallel.executor)(start.config)
        executor.on_wait = status.go_on
        executor.begin()
        from ringcore.engine_core.admin.opening import open_admin
        from ringcore.engine_core.core import EngineCore
        from ringcore.engine_core.loop import EngineLoop

        admin = open_admin(start.config, fds[STATUS])  # before it waits for the workers: a port in use fails at once
        core = EngineCore(start.config, executor, on_recovery=announce_recovery)
        status.end()  # start-up is over
        loop = EngineLoop(core, channel, admin, status if executor.pids() else None)
        loop.announce_ready()
        gc.collect()
        gc.freeze()  # objects of start-up live as long as the process: later collections skip them
        loop.run()
    except BaseException as error:
        _set_handlers(signal.SIG_IGN)
        _send_fatal_error(channel, admin, error)  # before the workers' shutdown, for which the client need not wait
        raise SystemExit(1) from None
    finally:
        _set_handlers(signal.SIG_IGN)
        status.end()  # the workers' shutdown is not an iteration of the loop
        if admin is not None:
            admin.fail(wire_error(EngineDeadError("the engine was closed", process="engine")))
        if core is not None:
            core.shutdown()
        elif executor is not None:
            executor.shutdown()
        channel.close(_CLOSE_LINGER_S)
        if admin is not None:
            admin.close(_FLUSH_TIMEOUT_S)


def _set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGALRM):  # SIGALRM: `_raise_again`
        signal.signal(number, handler)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """What a signal's handler raises within a destructor, of ZeroMQ's messages for one, is lost: it is raised again."""
    if isinstance(lost.exc_value, _Terminated):
        signal.setitimer(signal.ITIMER_REAL, _RAISED_AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def _send_fatal_error(channel: EngineChannel, admin: AdminEndpoint | None, error: BaseException) -> None:
    if isinstance(error, _Terminated):
        error = EngineDeadError("the engine process was asked to end by SIGTERM", process="engine", signal="SIGTERM")
    elif not isinstance(error, RingcoreError):
        _log.error("the engine process failed", exc_info=error)
        error = EngineDeadError(f"the engine process failed: {type(error).__name__}: {error}", process="engine")
    wire = wire_error(error)
    try:
        channel.send(EngineDead(wire))
    except (TypeError, ValueError, OverflowError, RecursionError) as failure:
        wire = wire_without_details(error, failure)
        channel.send(EngineDead(wire))
    if admin is not None:
        admin.fail(wire)
    channel.flush(_FLUSH_TIMEOUT_S)
