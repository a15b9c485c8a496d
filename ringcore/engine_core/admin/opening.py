"""Opens an engine's admin sockets, and publishes the description by which the local one is found.

The description is in a memfd of the engine process. The kernel lets the user's other processes read it through
/proc/PID/fd, as a debugger could, while the engine starts, computes or hangs; nothing is left of it afterwards.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import ExitStack

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.admin.endpoint import AdminEndpoint
from ringcore.engine_core.admin.listener import AdminListener, admin_limits
from ringcore.engine_core.admin.local_listener import LocalListener
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.executor.ring_memory import SEALS, seal, unnamed_file
from ringcore.protocol.engine_description import EngineDescription

__all__ = ["DESCRIPTION", "open_admin"]

DESCRIPTION = "description"  # in the name that /proc shows for its memory

_log = logging.getLogger(__name__)


def open_admin(config: EngineConfig, status_fd: int) -> AdminEndpoint | None:
    """The endpoint of the sockets that the options ask for; None if they ask for none. Raises `ConfigError` for a TCP
    address or keys that cannot be used."""
    limits = admin_limits(config.parallel.layout.world_size)
    listeners: list[AdminListener] = []
    with ExitStack() as undo:
        if config.parallel.admin_endpoint is not None:
            assert config.parallel.admin_keys is not None, "the configuration rejects an endpoint without keys"
            from ringcore.engine_core.admin.curve_listener import CurveListener  # the only import of ZeroMQ

            listeners.append(CurveListener(config.parallel.admin_endpoint, config.parallel.admin_keys, limits))
            undo.callback(listeners[0].close, 0.0)
        if config.parallel.local_admin:
            address = listeners[0].address if listeners else None
            description = _describe(config, status_fd, address)
            try:
                _publish(description)  # first: who finds the socket reads it
                name = LocalName(os.geteuid(), description.pid, description.engine_id)
                listeners.append(LocalListener(name, limits))
            except OSError as error:
                _log.warning("'ringcore ps' and 'ringcore rpc' will not find this engine: %s", error)
        undo.pop_all()
    return AdminEndpoint(listeners, limits) if listeners else None


def _describe(config: EngineConfig, status_fd: int, admin_endpoint: str | None) -> EngineDescription:
    return EngineDescription(
        engine_id=os.urandom(4).hex(),
        pid=os.getpid(),
        model=config.model.model,
        executor=config.parallel.executor,
        device=config.device.device,
        num_ranks=config.parallel.layout.world_size,
        started_s=time.monotonic(),
        status_fd=status_fd,
        admin_endpoint=admin_endpoint,
        owner_pid=os.getppid(),
    )


def _publish(description: EngineDescription) -> None:
    """The descriptor stays open for the life of the process."""
    fd = unnamed_file(DESCRIPTION)
    os.write(fd, msgspec.msgpack.encode(description))
    seal(fd, SEALS | fcntl.F_SEAL_WRITE)
