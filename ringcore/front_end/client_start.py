"""Starts an engine process, or adopts a parked one, and gives its client."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.config import EngineConfig
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.start_checks import check_start
from ringcore.tracing import Tracer

__all__ = ["start_client"]


def start_client(
    config: EngineConfig, tracer: Tracer | None = None, observers: Sequence[FrontEndObserver] = ()
) -> EngineCoreClient:
    """As the option `start_from` says, without waiting until the engine is ready.

    Raises as `check_start`; `ConfigError` if no parked engine fits and the option demands one, `EngineDeadError` for
    one that dies meanwhile.
    """
    if config.parallel.start_from != "new":
        from ringcore.front_end.parking.adoption import adopt_parked  # most engines are new ones

        adopted = adopt_parked(config)
        if adopted is not None:
            client = EngineCoreClient(
                config, observers, tracer=tracer, connection=EngineConnection(config, adopted.ends)
            )
            try:
                client.begin_waking(adopted.wake_up, adopted.ready, adopted.began_s)
            except BaseException:
                client.close()
                raise
            return client
    check_start(config)
    return EngineCoreClient(config, observers, tracer=tracer)
