"""The engines of a job, each with devices of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringcore.errors import ConfigError
from ringcore.host.resources import Host

__all__ = ["options_of_engines"]

_WORKER_RESTARTS = 4  # unless the options say otherwise: cheaper than another engine
_CPU_SHARE = 0.75  # of the memory that the weights leave: the engine's default, which the engines of a job divide


def options_of_engines(shared: Mapping[str, Any], num_engines: int, host: Host | None = None) -> list[dict[str, Any]]:
    """The options of each engine. Engine i of several has the i-th group of as many GPUs as it has ranks, of the first
    ones or of `device_ids`; on a CPU its part of the memory. Raises `ConfigError`."""
    options = {"max_worker_restarts": _WORKER_RESTARTS} | dict(shared)
    if num_engines == 1:
        return [options]
    device = options.get("device", "auto")
    if device == "cpu" or (device == "auto" and not (host or Host()).has_gpu()):
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
