"""Where the ranks of an engine run in a Ray cluster: a placement group, whose bundles Ray puts on its nodes.

A bundle has the resources of one stage's ranks, so that they lie on one node; where no node of the cluster is large
enough it has those of one rank. When a node is lost Ray places its bundles anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringcore.config.rank_layout import LOCALHOST, RankLayout
from ringcore.errors import CapacityError

__all__ = ["Placement", "RayHost", "bundles_of", "hosts_of", "layout_of", "resources_of_rank"]

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RayHost:
    """The ranks of one node. bundles: of the placement group, on this node. num_cpus: of a rank."""

    node_id: str
    name: str
    ranks: tuple[int, ...]
    bundles: tuple[int, ...]
    num_cpus: int


def resources_of_rank(given: Mapping[str, float] | None, device: str, cluster: Mapping[str, float]) -> dict[str, float]:
    """What a rank needs: as given, or a GPU, or a CPU. cluster: the resources of all nodes."""
    if given is not None:
        return dict(given)
    return {"GPU": 1} if device == "cuda" or (device == "auto" and cluster.get("GPU")) else {"CPU": 1}


def bundles_of(
    layout: RankLayout, rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """The resources of each bundle, in the order of the ranks. nodes: the resources of each node, used or not."""
    size = layout.ranks_per_stage
    stage = {name: size * amount for name, amount in rank.items()}
    if any(all(node.get(name, 0) >= amount for name, amount in stage.items()) for node in nodes):
        return [stage] * layout.num_stages
    return [dict(rank)] * layout.world_size


def hosts_of(
    layout: RankLayout,
    rank: Mapping[str, float],
    nodes_of_bundles: Sequence[str],
    nodes: Mapping[str, Mapping[str, Any]],
    here: str | None = None,
) -> list[RayHost]:
    """The hosts, in the order of their ranks: the ranks of a host follow each other, the largest host comes first.

    nodes_of_bundles: the id of each bundle's node. nodes: what Ray says of each node, by id. here: the node that is
    `LOCALHOST`.
    """
    size = layout.world_size // len(nodes_of_bundles)
    bundles: dict[str, list[int]] = {}
    for bundle, node_id in enumerate(nodes_of_bundles):
        bundles.setdefault(node_id, []).append(bundle)
    hosts: list[RayHost] = []
    first = 0
    for node_id in sorted(bundles, key=lambda one: (-len(bundles[one]), one != here, one)):
        own = bundles[node_id]
        ranks = tuple(range(first, first + size * len(own)))
        first += len(ranks)
        name = LOCALHOST if node_id == here else f"{nodes[node_id]['NodeManagerHostname']}-{node_id[:8]}"
        hosts.append(
            RayHost(node_id, name, ranks, tuple(own), _num_cpus(rank, nodes[node_id]["Resources"], len(ranks)))
        )
    return hosts


def _num_cpus(rank: Mapping[str, float], node: Mapping[str, float], num_ranks: int) -> int:
    """Those of a rank; where none are asked for, its share of its node's, as one of the node's GPUs."""
    share = rank.get("CPU") or node.get("CPU", 0) / max(num_ranks, node.get("GPU", 0))
    return max(1, int(share))


def layout_of(layout: RankLayout, hosts: Sequence[RayHost]) -> RankLayout:
    """With the hosts of the ranks."""
    names = tuple(host.name for host in hosts for _ in host.ranks)
    return RankLayout(hosts=names, output_rank=layout.output_rank, num_stages=layout.num_stages)


class Placement:
    """A placement group, until `close`. ray: the module, connected. here: as of `hosts_of`. bundle: the resources of
    each bundle."""

    def __init__(
        self, ray: Any, layout: RankLayout, resources: Mapping[str, float] | None, device: str, here: str | None
    ) -> None:
        self._ray, self._layout, self._here = ray, layout, here
        self._rank = resources_of_rank(resources, device, ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._bundles = bundles_of(layout, self._rank, nodes)
        self.bundle = self._bundles[0]
        self.group = ray.util.placement_group(self._bundles, strategy="PACK")

    def wait(self, deadline: float, check: Callable[[], None]) -> list[RayHost]:
        """The hosts, once every bundle has a node. check: called meanwhile; it may raise.

        Raises `CapacityError` after the deadline. What it returns may be outdated: Ray learns of a lost node late.
        """
        while True:
            check()
            table = self._ray.util.placement_group_table(self.group)
            nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
            placed = [table["bundles_to_node_id"].get(index) for index in range(len(self._bundles))]
            if table["state"] == "CREATED" and all(one in nodes for one in placed):
                return hosts_of(self._layout, self._rank, placed, nodes, self._here)
            if time.monotonic() >= deadline:
                raise self._too_little()
            time.sleep(_LOOK_S)

    def _too_little(self) -> CapacityError:
        names = sorted(self.bundle)
        available, total = self._ray.available_resources(), self._ray.cluster_resources()
        of_all = "; ".join(f"{name} {available.get(name, 0):g} free of {total.get(name, 0):g}" for name in names)
        asked = f"{len(self._bundles)} x {self.bundle}"
        return CapacityError(
            f"Ray has not placed the ranks in time: asked for {asked}, the cluster has {of_all}; lower "
            "tensor_parallel_size or ray_resources, add nodes, or raise ray_timeout_s",
            needed={name: amount * len(self._bundles) for name, amount in self.bundle.items()},
            available={name: available.get(name, 0) for name in names},
        )

    def strategy(self, bundle: int) -> Any:
        """The scheduling strategy of what shall run in this bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def close(self) -> None:
        """Ends what runs in the group. Without a connection the group has ended with it."""
        if self._ray.is_initialized():
            self._ray.util.remove_placement_group(self.group)
