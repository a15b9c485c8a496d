"""The options of engines that share a host: devices, memory and an admin port of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringcore.errors import ConfigError
from ringcore.host.resources import Host

__all__ = ["options_of_engines"]

_CPU_SHARE = 0.75  # of the memory that the weights leave: the engine's default, which the engines of a host divide


def options_of_engines(shared: Mapping[str, Any], num_engines: int, host: Host | None = None) -> list[dict[str, Any]]:
    """The options of each engine. Engine i of several has the i-th group of as many GPUs as it has ranks, of the first
    ones or of `device_ids`; on a CPU its part of the memory; and the port of `admin_endpoint` plus i. Raises
    `ConfigError`."""
    options = dict(shared)
    if num_engines == 1:
        return [options]
    return [
        of_device | _admin_endpoint(options, i)
        for i, of_device in enumerate(_on_devices(options, num_engines, host or Host()))
    ]


def _on_devices(options: dict[str, Any], num_engines: int, host: Host) -> list[dict[str, Any]]:
    device = options.get("device", "auto")
    if device == "cpu" or (device == "auto" and not host.has_gpu()):
        options.setdefault("gpu_memory_utilization", _CPU_SHARE / num_engines)
        return [options] * num_engines
    size = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    ids = options.pop("device_ids", None) or list(range(num_engines * size))
    if len(ids) != num_engines * size:
        raise ConfigError(
            f"device_ids={ids}: {num_engines} engines of {size} ranks need {num_engines * size} GPUs; give as many",
            option="device_ids",
            value=ids,
        )
    groups = [list(ids[size * i : size * (i + 1)]) for i in range(num_engines)]
    # Not "auto": an engine that found no GPU in its group would run on the CPU.
    return [options | {"device": "cuda", "device_ids": group} for group in groups]


def _admin_endpoint(options: Mapping[str, Any], number: int) -> dict[str, str]:
    """Port 0 picks one for each; what is no endpoint is refused with the other options."""
    host, _, port = str(options.get("admin_endpoint") or "").rpartition(":")
    return {"admin_endpoint": f"{host}:{int(port) + number}"} if port.isdigit() and int(port) else {}
