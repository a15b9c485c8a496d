"""The engines of a job on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ringcore.batch.figures import Figures
from ringcore.batch.lines import Outcome
from ringcore.batch.on_ray.replica import ActorStarter, RayReplica
from ringcore.batch.on_ray.shared_lines import SharedLines
from ringcore.batch.options import BatchOptions
from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.executor.ray_cluster.connection import RayConnection
from ringcore.executor.ray_cluster.placement import resources_of_rank
from ringcore.front_end.replicas.device_groups import options_of_engines

__all__ = ["EnginesOnRay"]

_OF_RAY = ("ray_resources", "ray_runtime_env", "ray_timeout_s")


class EnginesOnRay:
    """config: of each engine. As many actors as `data_parallel`, each with the resources of all ranks of its engine,
    whose workers are processes of the actor's node."""

    def __init__(self, shared: Mapping[str, Any], options: BatchOptions) -> None:
        """shared: the options of each engine. Raises `ConfigError`."""
        if shared.get("executor", "multiproc") == "ray":
            text = "executor='ray': with --ray an engine is on one node; leave it out, or run one engine without --ray"
            raise ConfigError(text, option="executor", value="ray")
        engine = {name: value for name, value in shared.items() if name not in (*_OF_RAY, "ray_address")}
        address = None if options.ray == "auto" else options.ray
        of_ray = {name: shared[name] for name in _OF_RAY if name in shared}
        self._ray = EngineConfig.from_options(**engine | of_ray | {"executor": "ray"}).parallel
        self._options, self._address = options, address
        self._engine = engine
        self.config = EngineConfig.from_options(**engine)

    def make(self, figures: Figures, deliver: Callable[[Outcome], None]) -> list[RayReplica]:
        """Connects to the cluster, until all replicas are closed. Raises `ConfigError`."""
        connection = RayConnection(self._address, self._ray.ray_runtime_env)
        rank = resources_of_rank(self._ray.ray_resources, self.config.device.device, connection.ray.cluster_resources())
        size = self.config.parallel.layout.world_size
        starter = ActorStarter(
            connection.ray,
            {name: size * amount for name, amount in rank.items()},
            connection.environment_with({"OMP_NUM_THREADS": str(max(1, int(rank.get("CPU", 1))))}),
            (self._options_on(rank), replace(self._options, ray=None)),
            self._ray.ray_timeout_s,
        )
        num_open = self._options.data_parallel

        def release() -> None:
            nonlocal num_open
            num_open -= 1
            if not num_open:
                connection.close()

        lines = SharedLines()
        return [
            RayReplica(starter, lines, self._options.engine_restarts, figures, deliver, release)
            for _ in range(self._options.data_parallel)
        ]

    def _options_on(self, rank: Mapping[str, float]) -> dict[str, Any]:
        """Not "auto": an engine that found no GPU would run on the CPU. There it has its part of the memory, since Ray
        may put several on one node."""
        device = self._engine.get("device", "auto")
        if device == "auto":
            device = "cuda" if "GPU" in rank else "cpu"
        options = self._engine | {"device": device}
        return options if device == "cuda" else options_of_engines(options, self._options.data_parallel)[0]
