"""The agents that Ray runs for an engine: one actor a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringcore.config.admin_keys import ClientKeys
from ringcore.errors import EngineDeadError
from ringcore.executor.ray_cluster.connection import RayConnection, refused
from ringcore.executor.ray_cluster.placement import Placement, RayHost

__all__ = ["AgentActor", "RayAgents"]

_PATIENCE_S = 60.0  # for the engine; Ray ends the actor of an engine that has died
_MAX_DEATHS = 5  # of the agents of one start, without a result


class AgentActor:
    """Runs on its host, as Ray's actor."""

    def serve(self, endpoint: str, keys: ClientKeys, name: str, node_id: str) -> None:
        """As `ringcore worker`; returns when the engine has ended, or where this is another node: Ray has moved it."""
        import ray

        from ringcore.executor.far.agent import serve_engine

        if ray.get_runtime_context().get_node_id() == node_id:
            serve_engine(endpoint, keys, name, _PATIENCE_S)


def _gpu_ids() -> tuple[str, list[str]]:
    """Of the bundle where this runs: its node, and the GPUs that Ray has given it."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class _Agent(NamedTuple):
    """host: whose ranks it runs. actor: Ray's handle. served: Ray's reference to the end of `serve`."""

    host: RayHost
    actor: Any
    served: Any


class RayAgents:
    """endpoint, keys: where and how they join the engine."""

    def __init__(self, connection: RayConnection, placement: Placement, endpoint: str, keys: ClientKeys) -> None:
        self._connection, self._placement = connection, placement
        self._ray = connection.ray
        self._endpoint, self._keys = endpoint, keys
        self._agents: list[_Agent] = []
        self._gpus: dict[tuple[str, int], Any] = {}  # Ray's reference to `_gpu_ids`, by node and bundle
        self.num_deaths = 0  # since the caller has set it to 0

    def run_on(self, hosts: Sequence[RayHost]) -> None:
        """Makes it one living agent a host, where its GPUs are known yet; the caller calls again until all have joined.
        Agents that have ended are replaced, those of other hosts ended.

        Raises `EngineDeadError` if Ray cannot run them: of Ray's error, or after too many ends of theirs.
        """
        kept = []
        for agent in self._agents:
            if self._has_ended(agent):
                self.num_deaths += 1
            elif agent.host in hosts:
                kept.append(agent)
            else:
                self._ray.kill(agent.actor)
        self._agents = kept
        running = [agent.host for agent in kept]
        for host in hosts:
            if host not in running and (environment := self.environment_of(host)) is not None:
                self._agents.append(self._start(host, environment))

    def _has_ended(self, agent: _Agent) -> bool:
        done, _ = self._ray.wait([agent.served], timeout=0)
        if not done:
            return False
        from ray.exceptions import RayActorError, RayError

        try:
            self._ray.get(agent.served)
        except RayActorError as error:  # it has died, or its node has
            if self.num_deaths >= _MAX_DEATHS:
                raise _cannot_run(agent.host, error) from error
        except RayError as error:  # its environment, or what it has raised
            raise _cannot_run(agent.host, error) from error
        return True

    def environment_of(self, host: RayHost) -> dict[str, str] | None:
        """Variables of the host's workers; None while its GPUs are not known."""
        gpus = self._gpus_of(host)
        if gpus is None:
            return None
        return {"OMP_NUM_THREADS": str(host.num_cpus)} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})

    def _gpus_of(self, host: RayHost) -> list[str] | None:
        """The ids of the host's GPUs, in the order of its ranks; None until a task in each bundle has told them."""
        num_gpus = self._placement.bundle.get("GPU", 0)
        if not num_gpus:
            return []
        task = self._ray.remote(max_retries=0)(_gpu_ids)
        for bundle in host.bundles:
            if (host.node_id, bundle) not in self._gpus:
                strategy = self._placement.strategy(bundle)
                asked = task.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy).remote()
                self._gpus[host.node_id, bundle] = asked
        asked_of = [self._gpus[host.node_id, bundle] for bundle in host.bundles]
        done, _ = self._ray.wait(asked_of, num_returns=len(asked_of), timeout=0)
        if len(done) < len(asked_of):
            return None
        from ray.exceptions import RayError

        try:
            told = self._ray.get(asked_of)
        except RayError:  # their node has died
            told = []
        if not told or any(node_id != host.node_id for node_id, _ in told):  # Ray has moved a bundle meanwhile
            for bundle in host.bundles:
                del self._gpus[host.node_id, bundle]
            return None
        return [one for _, gpus in told for one in gpus]

    def _start(self, host: RayHost, variables: Mapping[str, str]) -> _Agent:
        environment = self._connection.environment_with(variables)
        options = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "runtime_env": environment}
        options["scheduling_strategy"] = self._placement.strategy(host.bundles[0])
        try:
            actor = self._ray.remote(AgentActor).options(**options).remote()
        except (OSError, TypeError, ValueError) as error:
            raise refused("ray_runtime_env", environment, error) from error
        return _Agent(host, actor, actor.serve.remote(self._endpoint, self._keys, host.name, host.node_id))


def _cannot_run(host: RayHost, error: Exception) -> EngineDeadError:
    from ray.exceptions import RayTaskError

    cause = error.cause if isinstance(error, RayTaskError) else error  # without the agent's traceback
    text = f"Ray cannot run the agent of the host {host.name!r}: {type(cause).__name__}: {cause}"
    return EngineDeadError(text, process="workers", host=host.name)
