"""What programs of this user keep parked, for operators; and how it is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import psutil

from ringcore.errors import InvalidRequestError, RpcTimeoutError
from ringcore.front_end.parking.park_socket import ParkName, connect_to_park, find_parks
from ringcore.protocol.parking import STOP, ParkOffer

__all__ = ["host_bytes", "offers", "stop_parks"]

_STOP_S = 60.0  # the engines of a program are ended one after the other


def offers() -> Iterator[ParkOffer]:
    """Of every program of this user that answers."""
    for name in find_parks():
        with suppress(OSError, msgspec.DecodeError):
            sock, offer = connect_to_park(name)
            sock.close()
            yield offer


def host_bytes(offer: ParkOffer) -> int:
    """The resident host memory of the parked processes, as far as this user may know it."""
    num_bytes = 0
    for pids in offer.pids:
        for pid in pids.values():
            with suppress(psutil.Error):
                num_bytes += psutil.Process(pid).memory_info().rss
    return num_bytes


def stop_parks(model: str | None) -> list[ParkOffer]:
    """Ends the parked engines of this user, or those of one model (its name, path, or the last part of it); what they
    offered. Raises `InvalidRequestError` if there are none, `RpcTimeoutError` if they do not end."""
    asked: dict[ParkName, ParkOffer] = {}
    for name in find_parks():
        with suppress(OSError, msgspec.DecodeError):
            sock, offer = connect_to_park(name)
            with sock:
                if model is None or model.rstrip("/") in (offer.model, os.path.basename(offer.model)):
                    sock.send(STOP)
                    asked[name] = offer
    if not asked:
        text = f"model={model!r}: this user keeps no parked engine of it; look at 'ringcore park --list'"
        raise InvalidRequestError(text, field="model", value=model)
    deadline = time.monotonic() + _STOP_S
    while left := asked.keys() & set(find_parks()):
        if time.monotonic() >= deadline:
            text = f"the processes {sorted(one.pid for one in left)} still keep parked engines after {_STOP_S} s"
            raise RpcTimeoutError(text, method="stop", timeout_s=_STOP_S, missing_ranks=[])
        time.sleep(0.02)
    return list(asked.values())
