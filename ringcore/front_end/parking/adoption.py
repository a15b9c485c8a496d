"""Adopts a parked engine in place of a start: its processes belong to this one from then on, and die with it."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.front_end.engine_ends import NUM_FDS, EngineEnds
from ringcore.front_end.parking.key import differences, parked_key
from ringcore.front_end.parking.park_socket import ParkName, connect_to_park, find_parks
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.operations import MemoryOperation, ReloadWeights, WakeUp
from ringcore.protocol.parking import MAX_BYTES, TAKE, HandOver, NoneParked, ParkAnswer, ParkedKey

__all__ = ["AdoptedEngine", "adopt_parked"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdoptedEngine:
    """wake_up: what it has to do before it serves, in this order. ready: its report, for then. began_s: monotonic
    seconds."""

    ends: EngineEnds
    wake_up: list[MemoryOperation]
    ready: EngineReady
    began_s: float


class _Refused(Exception):
    """Why an engine was not adopted."""


def adopt_parked(config: EngineConfig) -> AdoptedEngine | None:
    """For `start_from` "parked" and "parked_only". None: start a new one, and the log says why. Raises `ConfigError`
    where the option demands a parked one."""
    began_s = time.monotonic()
    refusals = []
    names = find_parks()
    wanted = parked_key(config) if names else None
    for name in names:
        assert wanted is not None
        try:
            return _adopt(name, wanted, config, began_s)
        except (_Refused, OSError, msgspec.DecodeError) as error:
            refusals.append(f"process {name.pid}: {error}")
    reason = "; ".join(refusals) or "this user keeps none in this network namespace; run 'ringcore park'"
    if config.parallel.start_from == "parked_only":
        text = f"start_from='parked_only': no parked engine can be adopted: {reason}"
        raise ConfigError(text, option="start_from", value="parked_only")
    _log.warning("a new engine starts, no parked one fits: %s", reason)
    return None


def _adopt(name: ParkName, wanted: ParkedKey, config: EngineConfig, began_s: float) -> AdoptedEngine:
    sock, offer = connect_to_park(name)
    with sock:
        if found := differences(offer.key, wanted):
            raise _Refused(", ".join(found))
        sock.send(TAKE)
        data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, NUM_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        match msgspec.msgpack.decode(data, type=ParkAnswer):
            case HandOver(pid, level, ready) if len(fds) == NUM_FDS:
                ends = EngineEnds.received(pid, fds)
            case NoneParked(reason):
                raise _Refused(reason)
            case _:
                raise _Refused(
                    f"{len(fds)} descriptors arrived of {NUM_FDS}; raise the limit of open files (ulimit -n)"
                )
    except BaseException:  # without its descriptors the engine ends
        for fd in fds:
            os.close(fd)
        raise
    wake_up: list[MemoryOperation] = [WakeUp()]
    if level == 2:
        wake_up.append(ReloadWeights(config.model.files.path, "abort"))
    return AdoptedEngine(ends, wake_up, ready, began_s)
