"""Workers on the nodes of a Ray cluster, two of which have resources; nodes, agents and engines that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import SLOW, expected, make_model_folder
from fake_ray import FakeRay
from fake_worker import FACTORY, fake_config, step
from far_agent import with_path
from process_checks import BOUND_S, is_gone
from test_executor_conformance import (  # noqa: F401  they are run with the fixture `executor` of this file
    test_a_raising_method_says_where_and_what,
    test_a_step_returns_the_output_ranks_arrays,
    test_a_timeout_names_the_call_and_spoils_nothing,
    test_an_error_in_a_step_is_that_steps_error,
    test_arguments_and_values_of_any_size,
    test_read_only_methods,
    test_what_is_the_engines_no_call_from_outside_reaches,
)

import ringcore.batch
from ringcore import AsyncEngine, SamplingParams
from ringcore.errors import CapacityError, ConfigError, EngineDeadError, ModelLoadError
from ringcore.executor.far import several_hosts
from ringcore.executor.ray_cluster.executor import RayExecutor
from ringcore.testing import FakeExecutor

pytest.importorskip("ray")
from ray_nodes import RayNodes

HERE = Path(__file__).parent
FOLDERS = [HERE.parents[1], HERE.parent, HERE, HERE.parent / "batch"]
START_S = 120.0
MODEL = {"load_format": "dummy", "max_model_len": 128}


@pytest.fixture(scope="module")
def nodes():
    made = RayNodes(2, FOLDERS)
    yield made
    made.close()


def make(nodes: RayNodes, num_ranks: int, trouble: str = "", **options) -> RayExecutor:
    options = {"executor": "ray", "ray_address": nodes.address, "ray_timeout_s": START_S} | options
    return RayExecutor(fake_config(num_ranks, trouble, **options), worker_factory=FACTORY)


def hosts_of(pids: dict[str, int]) -> list[str]:
    """Of the ranks."""
    return [name.split(" on ")[1] for name in pids if " on " in name]


def test_two_ranks_on_two_nodes(nodes):
    two = make(nodes, 2, ray_resources={"slot": 1})
    try:
        two.start()
        first, second = hosts_of(two.pids())
        assert first != second
        assert two.collective_rpc("environment", ["CUDA_VISIBLE_DEVICES"]) == [None, None]
        assert two.execute_model(step(1)).result(BOUND_S).step == 1
    finally:
        two.shutdown()


@pytest.mark.long_form
def test_a_service_goes_on_when_a_node_is_killed(nodes, tmp_path):
    """Requests in flight are computed again, with the same tokens."""
    folder = make_model_folder(tmp_path)
    options = MODEL | {"executor": FakeRay, "tensor_parallel_size": 2, "ray_resources": {"slot": 1}}
    options |= {"ray_address": nodes.address, "max_worker_restarts": 3, "ray_timeout_s": START_S}
    prompts = [[1, SLOW, n] for n in range(3)]

    async def scenario():
        async with AsyncEngine(folder, **options) as engine:
            await generated(engine, prompts[0], 4)
            asked = [asyncio.create_task(generated(engine, prompt, 30)) for prompt in prompts]
            first, second = hosts_of(engine.ready.pids)
            assert first != second
            nodes.kill(second)  # Ray wants the main thread for it
            for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert answer == expected(prompt, 30)
            health = await engine.health()
            assert second in health.restart_cause
            assert (health.state, health.num_restarts) == ("ready", 1)

    asyncio.run(scenario())


async def generated(engine, prompt, num_tokens) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        last = output
    return last.outputs[0].token_ids


def test_too_few_resources_are_counted(nodes):
    """And what other engines had is free again."""
    with pytest.raises(CapacityError, match=r"asked for 5 x \{'GPU': 1\}, the cluster has GPU 4 free of 4") as caught:
        make(nodes, 5, ray_timeout_s=0.5).start()
    assert caught.value.details == {"needed": {"GPU": 5}, "available": {"GPU": 4}}


@pytest.mark.long_form
def test_a_job_goes_on_when_a_node_is_killed(nodes, tmp_path):
    """Its lines in flight are answered by others, each once, with the texts of a job without Ray."""
    folder = make_model_folder(tmp_path)
    lines = [{"custom_id": f"id-{i}", "prompt": f"{i} begins", "max_tokens": 1 + i % 17, "seed": i} for i in range(240)]
    asked = tmp_path / "in.jsonl"
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    ringcore.batch.run(asked, here, folder, executor=FakeExecutor, use_tqdm=False, **MODEL)
    flags = ["--model", folder, "--load-format", "dummy", "--max-model-len", "128", "--max-in-flight", "4"]
    flags += ["--executor", "batch_executors:Unhurried", "--ray", nodes.address, "--data-parallel", "2"]
    flags += ["--ray-resources", '{"CPU": 2}', "--no-progress"]
    command = [sys.executable, "-m", "ringcore.cli", "batch", str(asked), str(there), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=with_path(*FOLDERS)) as job:
        try:
            eventually(lambda: there.exists() and there.read_bytes().count(b"\n") > 20, job)
            nodes.kill(next(iter(nodes.nodes)))
            said = job.communicate(timeout=START_S)[1]
        finally:
            job.kill()
    assert job.returncode == 0, said
    assert "an engine on Ray is lost" in said
    assert sorted(there.read_text().splitlines()) == sorted(here.read_text().splitlines())


def eventually(holds, process) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------
# The long form.


@pytest.fixture(scope="module")
def executor(nodes, is_long):
    if not is_long:
        pytest.skip("every start costs seconds: part of the long form")
    made = make(nodes, 1, ray_resources={"spare": 1})  # the other tests need all else
    made.start()
    yield made
    made.shutdown()


def test_ranks_see_rays_gpus_and_outlive_agents_and_nodes(executor, nodes):
    four = make(nodes, 4)
    try:
        phases = four.start()
        assert [name for name in phases if "." not in name] == ["start_workers", "init_device", "load_model"]
        assert [value["rank"] for value in four.collective_rpc("who")] == [0, 1, 2, 3]
        assert four.collective_rpc("environment", ["CUDA_VISIBLE_DEVICES"]) == ["0,1"] * 4
        check_agents_death(four)
        check_a_nodes_death(four, nodes)
    finally:
        four.shutdown()


def check_agents_death(executor):
    """Its host lives: another agent runs there, with new workers."""
    names, old_pids = hosts_of(executor.pids()), executor.pids()
    (agent,) = {parent_of(pid) for name, pid in old_pids.items() if name.endswith(names[0])}
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"the host '{names[0]}'"):
        executor.collective_rpc("nap", [600.0])
    executor.restart()
    assert hosts_of(executor.pids()) == names
    assert all(map(is_gone, old_pids.values()))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_a_nodes_death(executor, nodes):
    """Its ranks move to another node."""
    names, old_pids = hosts_of(executor.pids()), executor.pids()
    slow = executor.submit_rpc("nap", [600.0])
    nodes.kill(names[3])
    with pytest.raises(EngineDeadError, match=f"the host '{names[3]}'") as caught:
        slow.result(BOUND_S)
    assert caught.value.details["host"] == names[3]
    executor.restart()
    assert names[0] in hosts_of(executor.pids())
    assert names[3] not in hosts_of(executor.pids())
    assert executor.execute_model(step(2)).result(BOUND_S).step == 2
    assert all(map(is_gone, old_pids.values()))


@pytest.mark.parametrize(("environment", "where"), [(None, "worker 0"), ({"env_vars": {"A": "b"}}, "worker 0 on ")])
def test_ranks_on_the_engines_own_node_are_its_children(nodes, executor, environment, where):
    """But where Ray shall make their environment."""
    made = make(nodes, 1, ray_resources={"here": 1}, ray_runtime_env=environment)
    made.start()
    try:
        (name,), (pid,) = made.pids(), made.pids().values()
        assert name.startswith(where)
        assert (parent_of(pid) == os.getpid()) == (environment is None)
        assert made.collective_rpc("environment", ["OMP_NUM_THREADS"]) == ["1"]
        assert made.collective_rpc("environment", ["A"]) == [None if environment is None else "b"]
        assert made.execute_model(step(1)).result(BOUND_S).step == 1
    finally:
        made.shutdown()


def test_what_stops_a_worker_from_starting_is_raised(nodes, executor):
    made = make(nodes, 1, trouble="fail in init")
    with pytest.raises(ModelLoadError):
        made.start()
    assert made.pids() == {} or all(map(is_gone, made.pids().values()))


def test_an_environment_that_ray_cannot_make_is_refused(nodes):
    with pytest.raises(ConfigError, match=r"^ray_runtime_env=.*Ray refuses: .*/nowhere"):
        make(nodes, 1, ray_runtime_env={"working_dir": "/nowhere"}).start()


def test_an_agent_that_cannot_join_tells_why(nodes, executor, monkeypatch):
    monkeypatch.setattr(several_hosts, "installed_version", lambda: "0.0")
    with pytest.raises(
        EngineDeadError, match=r"Ray cannot run the agent .*refused: it has ringcore .*, the engine 0.0"
    ):
        make(nodes, 1).start()


ENGINE = """
import sys, time
from fake_worker import FACTORY, fake_config
from ringcore.executor.far import several_hosts
from ringcore.executor.ray_cluster.executor import RayExecutor
from ringcore.testing import FakeExecutor
executor = RayExecutor(fake_config(2, executor="ray", ray_address=sys.argv[1]), worker_factory=FACTORY)
executor.start()
print(*executor.pids().values(), flush=True)
time.sleep(600)
"""


def test_a_killed_engine_leaves_nothing(nodes, executor):
    """Ray ends the agents of a driver that is gone, and frees its placement group."""
    arguments = [sys.executable, "-c", ENGINE, nodes.address]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=with_path(HERE.parent, HERE)) as engine:
        try:
            pids = list(map(int, engine.stdout.readline().split()))
            agents = {parent_of(pid) for pid in pids}
        finally:
            engine.kill()
    assert len(pids) == 2
    assert all(map(is_gone, [*pids, *agents]))
    began = time.monotonic()
    four = make(nodes, 4)
    four.start()
    four.shutdown()
    assert time.monotonic() - began < START_S / 2


DATASET = """
import sys
import ray
from ray.data.llm import build_processor
from ringcore.batch.on_ray.processor import RingcoreProcessorConfig
folder, address = sys.argv[1:]
ray.init(address=address)
config = RingcoreProcessorConfig(
    model_source=folder,
    engine_kwargs=dict(load_format="dummy", executor="batch_executors:Unhurried", max_model_len=128, device="cpu"),
    resources_per_rank={"CPU": 1, "GPU": 1},
    concurrency=2,
    batch_size=8,
)
processor = build_processor(
    config,
    preprocess=lambda row: dict(
        messages=[
            {"role": "system", "content": "You are a calculator"},
            {"role": "user", "content": f"{row['id']} ** 3 = ?"},
        ],
        sampling_params=dict(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False),
    ),
    postprocess=lambda row: dict(resp=row["generated_text"], **row),
)
rows = processor(ray.data.range(100)).take_all()
print(sorted(row["id"] for row in rows) == list(range(100)), {row["num_generated_tokens"] for row in rows})
"""


def test_rays_example_runs_with_our_class(nodes, executor, tmp_path):
    """That of its guide."""
    for name in ("pandas", "pyarrow"):
        pytest.importorskip(name)
    folder = make_model_folder(tmp_path)
    said = subprocess.run(
        [sys.executable, "-c", DATASET, folder, nodes.address],
        env=with_path(*FOLDERS),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert "True {20}" in said.stdout, said.stderr
