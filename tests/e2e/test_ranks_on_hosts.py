"""Ranks on several hosts give the tokens of one, also after one of the hosts was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import generate, make_core, tokens
from far_agent import Agent
from reference import differences, load

from ringcore import SamplingParams
from ringcore.config.admin_keys import create_keys
from ringcore.executor.far.several_hosts import free_port

ROOT = Path(__file__).parents[2]
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 17, 40])]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def join(tmp_path):
    """join(hosts): the options of an engine with these hosts, and their agents."""
    agents = []

    def start(hosts, **sizes):
        endpoint, keys = f"tcp://127.0.0.1:{free_port('127.0.0.1')}", tmp_path / "keys"
        create_keys(keys)
        agents.extend(Agent(name, endpoint, keys, []) for name in dict.fromkeys(hosts) if name != "localhost")
        options = {"hosts": hosts, "join_endpoint": endpoint, "join_keys": keys}
        return options | (sizes or {"tensor_parallel_size": len(hosts)}) | {"dtype": "float32"}, agents

    yield start
    for agent in agents:
        agent.kill()


@pytest.fixture(scope="module")
def expected(tiny_qwen2):
    with make_core(tiny_qwen2, executor="uniproc", dtype="float32", kv_cache_bytes=1 << 24) as core:
        return tokens(generate(core, PROMPTS, GREEDY))


OPTIONS = {"kv_cache_bytes": 1 << 24, "max_num_batched_tokens": 16, "max_worker_restarts": 1}


def test_one_rank_near_and_one_far(tiny_qwen2, join, expected, is_long):
    options, agents = join(["localhost", "b"])
    with make_core(tiny_qwen2, **OPTIONS, **options) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        if is_long:  # two more workers import torch
            lose_in_fifth_step(core, agents)
            assert tokens(generate(core, PROMPTS, GREEDY)) == expected
            assert (core.num_restarts, core.health().state) == (1, "ready")
            assert "the host 'b'" in core.health().restart_cause


@pytest.mark.long_form
def test_one_stage_near_and_one_far(tiny_qwen2, join, expected):
    options, _ = join(["localhost", "b"], pipeline_parallel_size=2)
    with make_core(tiny_qwen2, **OPTIONS, **options) as core:
        assert core.config.parallel.layout.output_rank == 1
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("hosts", [["localhost", "localhost", "b", "b"], ["b", "c", "localhost", "c"]])
def test_two_stages_of_two_ranks(tiny_qwen2, join, expected, is_long, hosts):
    """A stage on each host, and one host that has ranks of both; the host that computes tokens is lost."""
    if not is_long:
        pytest.skip("six processes that import torch: part of the long form")
    options, agents = join(hosts, pipeline_parallel_size=2, tensor_parallel_size=2)
    options |= {"num_blocks_override": 20, "block_size": 4, "max_model_len": 64}
    with make_core(tiny_qwen2, **OPTIONS, **options) as core:
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        lose_in_fifth_step(core, agents)
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        assert core.num_restarts == 1


def lose_in_fifth_step(core, agents) -> None:
    """The host dies, and its agent is started again."""
    step, left = core.step, [5]

    def step_or_lose():
        left[0] -= 1
        if left[0] == 0:
            lost = agents.pop()
            lost.kill()
            agents.append(lost.again())
        return step()

    core.step = step_or_lose


def test_ranks_and_stages_that_ray_places(tiny_qwen2, expected, is_long):
    """Each stage on a node of its own; also after one of the nodes was lost."""
    if not is_long:
        pytest.skip("a Ray cluster, and eight processes that import torch: part of the long form")
    pytest.importorskip("ray")
    from ray_nodes import RayNodes

    nodes = RayNodes(2, [ROOT])
    options = OPTIONS | {"executor": "ray", "ray_address": nodes.address, "ray_resources": {"CPU": 1}, "device": "cpu"}
    options |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float32"}
    try:
        with make_core(tiny_qwen2, **options) as core:
            hosts = [name.split(" on ")[1] for name in core.ready.pids if " on " in name]
            assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
            assert tokens(generate(core, PROMPTS, GREEDY)) == expected
            nodes.kill(hosts[2])
            assert tokens(generate(core, PROMPTS, GREEDY)) == expected
            assert (core.num_restarts, core.health().state) == (1, "ready")
    finally:
        nodes.close()


@pytest.mark.real_model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        (["b", "localhost", "c"], {"tensor_parallel_size": 3}),
        (["b", "localhost"], {"pipeline_parallel_size": 2}),
        (["b", "b", "b", "localhost", "c", "c"], {"pipeline_parallel_size": 2, "tensor_parallel_size": 3}),
    ],
)
def test_a_real_model_on_several_hosts(smollm2, join, is_long, hosts, sizes):
    """Its nine heads are three to a rank. So few blocks that requests are preempted, and prompts in several chunks."""
    if not is_long:
        pytest.skip("up to six processes with a model each: part of the long form")
    entries = [entry for entry in load("smollm2-135m-lengths") if len(entry.prompt_token_ids) <= 300][::3]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options, _ = join(hosts, **sizes)
    options |= {"max_num_batched_tokens": 64, "num_blocks_override": 28, "block_size": 16, "max_model_len": 384}
    with make_core(smollm2, **options) as core:
        outputs = generate(core, [entry.prompt_token_ids for entry in entries], params)
        assert differences(entries, tokens(outputs)) == []
        assert core.stats().num_preemptions > 0
