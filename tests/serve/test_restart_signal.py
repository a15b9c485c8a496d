"""SIGUSR1 to a service, at each time of its life."""

from __future__ import annotations

import asyncio
import os
import signal

from ringcore.errors import EngineDeadError
from ringcore.serve.restart_signal import RestartSignal


class Engines:
    """A restart lasts until `go_on` is set."""

    num_replicas = 2

    def __init__(self, error=None):
        self.num_restarts, self.error, self.go_on = 0, error, asyncio.Event()

    async def restart(self):
        self.num_restarts += 1
        await self.go_on.wait()
        if self.error is not None:
            raise self.error


def interrupt():
    os.kill(os.getpid(), signal.SIGUSR1)


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def test_while_the_engines_start_it_is_remembered(caplog):
    async def serve(restarts):
        engines = Engines()
        interrupt()
        await turns()
        assert engines.num_restarts == 0
        async with restarts.restarting(engines):
            engines.go_on.set()
            await turns()
            assert engines.num_restarts == 1  # two signals during the start are one
        interrupt()  # while the service ends

    before = signal.getsignal(signal.SIGUSR1)
    with RestartSignal(signal.SIGUSR1) as restarts:
        interrupt()
        asyncio.run(serve(restarts))
        interrupt()
    assert signal.getsignal(signal.SIGUSR1) is before
    told = [record.message for record in caplog.records]
    assert told == [
        "SIGUSR1: it came while the engines started",
        "2 engines are replaced, one after the other",
        "all engines were replaced",
    ]


def test_while_it_serves(caplog):
    """One restart at a time; one that failed does not end the service."""

    async def serve(restarts):
        engines = Engines(EngineDeadError("no device"))
        async with restarts.restarting(engines):
            await turns()
            assert engines.num_restarts == 0
            interrupt()
            await turns()
            interrupt()
            await turns()
            assert engines.num_restarts == 1
            engines.go_on.set()
            await turns()
            engines.go_on.clear()
            interrupt()
            await turns()
            assert engines.num_restarts == 2  # and is cancelled with the service

    with RestartSignal(signal.SIGUSR1) as restarts:
        asyncio.run(serve(restarts))
    assert "SIGUSR1: the engines are being replaced already" in caplog.text
    assert "the engines could not all be replaced: no device" in caplog.text
    assert "came while the engines started" not in caplog.text
