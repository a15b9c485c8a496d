"""A Ray cluster of several nodes, all on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

__all__ = ["RayNodes"]

STORE_BYTES = 80 << 20  # the least that Ray takes
QUICK_DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


class RayNodes:
    """A head with one "here", and `num_nodes` that import from `folders` and have two CPUs, two GPUs (which Ray
    believes), one "slot" and one "spare" each.

    address: of the cluster. nodes: Ray's objects of the other nodes, by id.
    """

    def __init__(self, num_nodes: int, folders: Sequence[Path]) -> None:
        self._folders = folders
        head = {"num_cpus": 0, "resources": {"here": 1}, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        with self._importing():
            self._cluster = Cluster(True, head_node_args=head | {"_system_config": QUICK_DEATHS})
        self.address = self._cluster.address
        self.nodes: dict[str, object] = {}
        for _ in range(num_nodes):
            self.add()

    @contextlib.contextmanager
    def _importing(self):
        """Nodes that start meanwhile import from the folders."""
        with pytest.MonkeyPatch.context() as patch:
            path = filter(None, [*map(str, self._folders), os.environ.get("PYTHONPATH")])
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            yield

    def add(self) -> None:
        with self._importing():
            node = self._cluster.add_node(
                num_cpus=2, num_gpus=2, resources={"slot": 1, "spare": 1}, object_store_memory=STORE_BYTES
            )
        self.nodes[node.node_id] = node

    def kill(self, name: str) -> None:
        """Kills the node of an executor's host, and adds another one."""
        (node_id,) = [one for one in self.nodes if one.startswith(name.rpartition("-")[2])]
        self._cluster.remove_node(self.nodes.pop(node_id), allow_graceful=False)
        self.add()

    def close(self) -> None:
        self._cluster.shutdown()
