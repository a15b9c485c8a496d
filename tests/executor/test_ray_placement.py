"""Which bundles are asked of Ray, and how ranks are ordered over the nodes that it finds. Without a cluster."""

from __future__ import annotations

import pytest

from ringcore.config.rank_layout import RankLayout
from ringcore.executor.ray_cluster.placement import bundles_of, hosts_of, layout_of, resources_of_rank

NODES = {
    name: {"NodeManagerHostname": "h", "Resources": {"GPU": gpus, "CPU": 32}}
    for name, gpus in (("aaaaaaaa1", 4), ("bbbbbbbb2", 8), ("cccccccc3", 4))
}


def layout(world_size: int, num_stages: int = 1) -> RankLayout:
    return RankLayout.on_one_host(world_size, num_stages)


@pytest.mark.parametrize(
    ("device", "cluster", "rank"),
    [
        ("auto", {"CPU": 4, "GPU": 2}, {"GPU": 1}),
        ("auto", {"CPU": 4}, {"CPU": 1}),
        ("cpu", {"CPU": 4, "GPU": 2}, {"CPU": 1}),
        ("cuda", {"CPU": 4}, {"GPU": 1}),
    ],
)
def test_what_a_rank_needs(device, cluster, rank):
    assert resources_of_rank(None, device, cluster) == rank
    assert resources_of_rank({"slot": 1}, device, cluster) == {"slot": 1}


def test_a_stages_ranks_are_asked_for_together_where_a_node_is_large_enough():
    nodes = [node["Resources"] for node in NODES.values()]
    assert bundles_of(layout(8), {"GPU": 1}, nodes) == [{"GPU": 8}]
    assert bundles_of(layout(8, 2), {"GPU": 1, "CPU": 2}, nodes) == [{"GPU": 4, "CPU": 8}] * 2
    assert bundles_of(layout(16), {"GPU": 1}, nodes) == [{"GPU": 1}] * 16
    assert bundles_of(layout(4), {"GPU": 1, "CPU": 9}, nodes) == [{"GPU": 1, "CPU": 9}] * 4
    assert bundles_of(layout(2), {"GPU": 1}, []) == [{"GPU": 1}] * 2  # its nodes come by an autoscaler


def test_ranks_are_ordered_by_host():
    """However Ray mixes the bundles."""
    a, b, c = NODES
    hosts = hosts_of(layout(6), {"GPU": 1}, [c, b, a, b, c, b], NODES)
    assert [(host.node_id, host.ranks, host.bundles) for host in hosts] == [
        (b, (0, 1, 2), (1, 3, 5)),
        (c, (3, 4), (0, 4)),
        (a, (5,), (2,)),
    ]
    here = hosts_of(layout(2), {"GPU": 1}, [a, c], NODES, here=c)
    assert [(host.node_id, host.name, host.ranks) for host in here] == [(c, "localhost", (0,)), (a, "h-aaaaaaaa", (1,))]
    placed = layout_of(layout(6), hosts)
    assert placed.hosts == ("h-bbbbbbbb",) * 3 + ("h-cccccccc",) * 2 + ("h-aaaaaaaa",)
    assert [placed.local_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 0]
    assert placed.output_rank == 0


def test_a_stage_is_on_one_host():
    a, b, c = NODES
    two = layout(8, 2)
    hosts = hosts_of(two, {"GPU": 1}, [c, a], NODES)
    placed = layout_of(two, hosts)
    assert placed.hosts == ("h-aaaaaaaa",) * 4 + ("h-cccccccc",) * 4
    assert (placed.num_stages, placed.output_rank) == (2, 4)
    assert hosts_of(two, {"GPU": 1}, [b, b], NODES)[0].ranks == tuple(range(8))


@pytest.mark.parametrize(("rank", "num_cpus"), [({"GPU": 1}, 4), ({"GPU": 1, "CPU": 3}, 3), ({"CPU": 0.5}, 1)])
def test_the_threads_of_a_rank(rank, num_cpus):
    """What it asked for, or its GPU's share of the node's cores."""
    (host,) = hosts_of(layout(2), rank, ["bbbbbbbb2"], NODES)
    assert host.num_cpus == num_cpus
