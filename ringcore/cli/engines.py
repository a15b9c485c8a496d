"""Which engine a command means: one of this user's on this host, or one that listens at an address."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringcore.errors import InvalidRequestError

if TYPE_CHECKING:
    from ringcore.front_end.admin_client import AdminClient
    from ringcore.front_end.local_engines import LocalEngine

__all__ = ["ENGINE_HELP", "KEYS_HELP", "EngineAddress", "choose_engine", "local_address"]

ENGINE_HELP = "a pid, an id or a model of 'ringcore ps', or tcp://HOST:PORT with --keys; default: the only engine"
KEYS_HELP = "for tcp://: a directory with server.key and client.key_secret"


class EngineAddress(NamedTuple):
    """Where an engine is. local: if it is on this host. connect: raises `RingcoreError`."""

    name: str
    local: LocalEngine | None
    connect: Callable[[], AdminClient]


def choose_engine(engine: str | None, keys: Path | None) -> EngineAddress:
    """Raises `InvalidRequestError`, with the candidates, unless one is meant."""
    from ringcore.front_end.admin_client import AdminClient

    if engine is None or not engine.startswith("tcp://"):
        if keys is not None:
            raise InvalidRequestError(f"keys={str(keys)!r}: only tcp://HOST:PORT needs keys", field="keys", value=None)
        from ringcore.front_end.local_engines import find_engine

        return local_address(find_engine(engine))
    if keys is None:
        raise InvalidRequestError(f"keys: give the keys of {engine} as --keys", field="keys", value=None)
    return EngineAddress(engine, None, lambda: AdminClient(engine, keys))


def local_address(engine: LocalEngine) -> EngineAddress:
    from ringcore.front_end.admin_client import AdminClient

    name = os.path.basename((engine.model or "").rstrip("/")) or engine.engine_id
    return EngineAddress(name, engine, lambda: AdminClient.local(engine))
