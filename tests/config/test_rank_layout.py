"""Which ranks share a host, and what is refused."""

from __future__ import annotations

import pytest

from ringcore.config import ParallelConfig, RankLayout
from ringcore.errors import ConfigError

TWO_HOSTS = RankLayout(hosts=("a", "a", "b", "a", "b"), output_rank=4)


def test_by_default_every_rank_is_on_this_host():
    layout = ParallelConfig(tensor_parallel_size=3).layout
    assert (layout.world_size, layout.output_rank, len(set(layout.hosts))) == (3, 0, 1)
    assert [layout.local_rank(rank) for rank in range(3)] == [0, 1, 2]
    assert {layout.num_local_ranks(rank) for rank in range(3)} == {3}
    layout.check_one_host("multiproc")


def test_ranks_are_counted_by_host():
    assert [TWO_HOSTS.local_rank(rank) for rank in range(5)] == [0, 1, 0, 2, 1]
    assert [TWO_HOSTS.num_local_ranks(rank) for rank in range(5)] == [3, 3, 2, 3, 2]
    assert TWO_HOSTS.num_ranks_on("c") == 0


def test_stages_are_successive_ranks_and_the_last_one_returns_the_output():
    layout = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3).layout
    assert (layout.world_size, layout.ranks_per_stage, layout.num_stages, layout.output_rank) == (6, 2, 3, 4)
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.tensor_rank_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_a_stage_may_share_a_host():
    layout = RankLayout.on_hosts(("a", "a", "b", "c"), num_stages=2)
    assert (layout.output_rank, layout.is_stage_on_one_host(0), layout.is_stage_on_one_host(1)) == (2, True, False)


def test_the_output_rank_is_of_the_last_stage():
    assert RankLayout(hosts=("a",) * 4, output_rank=3, num_stages=2).output_rank == 3
    with pytest.raises(AssertionError):
        RankLayout(hosts=("a",) * 4, output_rank=1, num_stages=2)


def test_a_layout_that_is_given_is_the_one():
    assert ParallelConfig(tensor_parallel_size=5, ranks=TWO_HOSTS).layout is TWO_HOSTS


def test_an_executor_of_one_host_refuses_several():
    with pytest.raises(ConfigError, match=r"executor='x': .* the ranks are on a, b; give an executor that") as caught:
        TWO_HOSTS.check_one_host("x")
    assert caught.value.details["option"] == "executor"


def test_the_output_rank_is_one_of_the_ranks():
    with pytest.raises(AssertionError):
        RankLayout(hosts=("a",), output_rank=1)
