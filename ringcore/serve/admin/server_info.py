"""What a service runs: its version, every option of its engines and its own, and the state of each replica."""

from __future__ import annotations

from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.serve.service import Service
from ringcore.version import __version__

__all__ = ["server_info"]


async def server_info(service: Service, timeout_s: float) -> dict[str, Any]:
    """JSON values alone, without a key."""
    healths = await service.engine.replica_healths(timeout_s)
    return {
        "version": __version__,
        "served_model_names": list(service.model_names),
        "config": _engine_options(service.engine.config),
        "service": {field.name: getattr(service.options, field.name) for field in service.options.bounds()},
        "replicas": [{"replica": number} | msgspec.to_builtins(one) for number, one in enumerate(healths)],
    }


def _engine_options(config: EngineConfig) -> dict[str, Any]:
    """As resolved; what is no JSON value, such as a class, as text."""
    parts = [getattr(config, part) for part in EngineConfig.PARTS]
    found = {name: getattr(part, name) for name in EngineConfig.options() for part in parts if hasattr(part, name)}
    plain: dict[str, Any] = msgspec.to_builtins(found, enc_hook=repr, str_keys=True)
    return plain
