"""A signal that replaces the engines of a service, one after the other."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ringcore.errors import RingcoreError
from ringcore.front_end.replicas.replica_set import ReplicaSet

__all__ = ["restarts_at"]

_log = logging.getLogger(__name__)


@asynccontextmanager
async def restarts_at(number: signal.Signals, engines: ReplicaSet) -> AsyncIterator[None]:
    """Has the signal restart the engines while this runs; another one meanwhile changes nothing."""
    loop, restarting = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def begin() -> None:
        if restarting:
            _log.warning("%s: the engines are being replaced already", number.name)
            return
        task = loop.create_task(_restart(engines))
        restarting.add(task)
        task.add_done_callback(restarting.discard)

    loop.add_signal_handler(number, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
        for task in restarting:
            task.cancel()


async def _restart(engines: ReplicaSet) -> None:
    _log.warning("%d engines are replaced, one after the other", engines.num_replicas)
    try:
        await engines.restart()
    except RingcoreError as error:
        _log.error("the engines could not all be replaced: %s", error.message)
    else:
        _log.warning("all engines were replaced")
