"""What is particular to the fake executor; what all executors promise is in tests/executor."""

from __future__ import annotations

import select
import time

import pytest
from fake_engines import add, drain, make_config, make_core

from ringcore.engine_core.core import EngineCore
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, RpcTimeoutError, WorkerError
from ringcore.executor import executor_class
from ringcore.front_end.client import EngineCoreClient
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import EngineCoreRequest, TokenLogprobs
from ringcore.protocol.steps import SchedulerOutput
from ringcore.testing import HARDWARE, FakeExecutor, Fault, StepCost, VirtualClock, write_model_config

BOUND_S = 60.0


def empty_step(number: int = 0) -> SchedulerOutput:
    return SchedulerOutput(number, 1, int_array(), [], [], int_array(), int_array(), 0)


def started(folder, **executor) -> FakeExecutor:
    """Ready for steps."""
    config = make_config(folder)
    fake = FakeExecutor(config, **executor)
    EngineCore(config, fake)
    return fake


def test_a_step_takes_what_it_costs(model_folder):
    core = make_core(make_config(model_folder), cost=StepCost(base_s=1.0, per_token_s=0.5, per_seq_s=0.25))
    add(core, "a", [1, 2, 3], max_tokens=2)
    add(core, "b", [1, 2], max_tokens=2)
    core.step()
    assert core.clock.now() == 1.0 + 5 * 0.5 + 2 * 0.25
    core.step()
    assert core.clock.now() == 4.0 + 1.0 + 2 * 0.5 + 2 * 0.25
    assert core.executor.busy_s == core.clock.now()
    assert core.executor.num_steps == 2


def test_steps_follow_one_another(model_folder):
    """Two in flight: the second begins where the first ends."""
    fake = started(model_folder, clock=(clock := VirtualClock(10.0)), cost=StepCost(base_s=2.0))
    first, second = fake.execute_model(empty_step(0)), fake.execute_model(empty_step(1))
    assert not first.done()
    assert fake.oldest_step_s() == 0.0
    clock.advance(2.0)
    assert first.done()
    assert not second.done()
    clock.advance(0.5)
    assert fake.oldest_step_s() == 0.5
    (rank,) = fake.health()
    assert (rank.method, rank.busy_s) == ("execute_model", 0.5)
    assert second.result().step == 1
    assert clock.now() == 14.0
    assert fake.oldest_step_s() is None


def test_a_step_that_is_not_done_in_time(model_folder):
    fake = started(model_folder, clock=(clock := VirtualClock()), cost=StepCost(base_s=2.0))
    future = fake.execute_model(empty_step())
    with pytest.raises(RpcTimeoutError):
        future.result(timeout=0.5)
    assert clock.now() == 0.5
    assert future.result(timeout=1.5).step == 0


def test_a_step_that_no_worker_could_do_fails_as_it_does_in_one(model_folder):
    fake = started(model_folder)
    with pytest.raises(WorkerError, match="AssertionError in 'execute_model' on rank 0: a row that is not in use"):
        fake.execute_model(SchedulerOutput(0, 1, int_array(), [], [], int_array([3]), None, 1)).result()


def test_in_real_time_a_step_is_done_when_its_cost_has_passed(model_folder):
    fake = started(model_folder, cost=StepCost(base_s=0.05))
    try:
        begun = time.monotonic()
        future = fake.execute_model(empty_step())
        poll = select.poll()
        for fd in fake.wait_fds():
            poll.register(fd, select.POLLIN)
        assert not future.done()
        assert poll.poll(BOUND_S * 1e3), "nobody was woken"
        assert time.monotonic() - begun >= 0.05
        assert future.done()
        assert not poll.poll(0), "the descriptor stays readable, and whoever waits on it never sleeps"
        assert future.result().step == 0
    finally:
        fake.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        fake.wait_fds()


def test_steps_without_cost_wake_nobody(model_folder):
    fake = started(model_folder)
    assert fake.wait_fds() == []
    assert fake.execute_model(empty_step()).done()


class PacedExecutor(FakeExecutor):
    """By name in a process of its own: what is not the default is given by a subclass."""

    def __init__(self, config) -> None:
        super().__init__(config, cost=StepCost(base_s=0.002), tokens=lambda tokens, position, seed: position)


@pytest.mark.parametrize("executor", ["ringcore.testing:FakeExecutor", PacedExecutor])
def test_behind_an_engine_process(model_folder, executor):
    config = make_config(model_folder, executor=executor, steps_in_flight=2)
    with EngineCoreClient(config) as client:
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=0)
        client.wait_ready()
        client.add_requests([EngineCoreRequest("a", [1, 2, 3], params, arrival_s=time.monotonic())])
        tokens = []
        while len(tokens) < 5:
            tokens += [t for output in client.get_outputs(BOUND_S).outputs for t in output.new_token_ids]
        assert client.collective_rpc("stats")[0]["num_steps"] >= 5
    assert len(tokens) == 5
    if executor is PacedExecutor:
        assert tokens == [3, 4, 5, 6, 7]


def test_every_log_probability_of_a_large_vocabulary(tmp_path):
    """Over all wires: of the sampled tokens of several requests at once, and of a prompt."""
    size = 150_000
    folder = write_model_config(tmp_path / "model", vocab_size=size)
    config = make_config(folder, executor="ringcore.testing:FakeExecutor", max_logprobs=-1)
    names = [f"r{i}" for i in range(5)]
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=0, logprobs=-1)
    requests = [EngineCoreRequest(name, [1, 2, 3], params, arrival_s=0.0) for name in names]
    of_prompt = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    requests.append(EngineCoreRequest("prompt", [7, 8, 9], of_prompt, arrival_s=0.0))
    with EngineCoreClient(config) as client:
        client.wait_ready()
        client.add_requests(requests)
        told: dict[str, list[TokenLogprobs]] = {name: [] for name in names}
        prompts, ended = [], set()
        while len(ended) < len(requests):
            for output in client.get_outputs(BOUND_S).outputs:
                assert output.error is None
                told.get(output.request_id, []).extend(output.logprobs or ())
                prompts += [output.prompt_logprobs] if output.prompt_logprobs is not None else []
                ended |= {output.request_id} if output.finish_reason is not None else set()
    for positions in told.values():
        assert [len(one.token_ids) for one in positions] == [1 + size] * 2
        assert len(set(positions[0].token_ids)) == size
    (prompt,) = prompts
    columns = prompt.token_ids.reshape(2, 1 + size)
    assert (prompt.count, columns[:, 0].tolist()) == (size, [8, 9])
    assert set(columns[1].tolist()) == set(range(size))


def test_it_answers_for_every_rank(tmp_path):
    """8 KV heads over 4 ranks; each has 2 of them, and a quarter of the weights."""
    folder = write_model_config(tmp_path, num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    core = make_core(make_config(folder, tensor_parallel_size=4))
    specs = core.executor.collective_rpc("get_kv_cache_spec")
    assert len(specs) == 4
    assert [spec["layers.0"]["num_kv_heads"] for spec in specs] == [2] * 4
    assert core.collective_rpc("health", unique_reply_rank=3)["rank"] == 3
    assert [rank.rank for rank in core.executor.health()] == [0, 1, 2, 3]
    with pytest.raises(InvalidRequestError, match="a rank from 0 to 3"):
        core.collective_rpc("health", unique_reply_rank=4)
    with pytest.raises(InvalidRequestError, match="no worker method 'statss'"):
        core.collective_rpc("statss")
    add(core, "a", [1, 2, 3])
    assert len(drain(core)["a"][0]) == 4


def test_the_worker_methods(model_folder):
    core = make_core(make_config(model_folder))
    assert core.collective_rpc("health")[0]["stage"] == "ready"
    assert core.config.scheduler.max_num_batched_tokens == core.ready.max_num_batched_tokens == 8192  # a GPU's
    add(core, "a", [1, 2, 3], max_tokens=2)
    drain(core)
    stats = core.collective_rpc("stats")[0]
    assert (stats["num_steps"], stats["num_tokens"]) == (2, 4)
    memory = core.collective_rpc("memory")[0]
    assert memory["kv_cache_bytes"] == (core.ready.num_blocks + 1) * 2 * 2 * 4 * 2 * 16 * 2
    assert "MainThread" in core.collective_rpc("stack")[0]
    assert "fake" in core.executor.diagnose()
    with pytest.raises(InvalidRequestError, match="only the engine itself calls it"):
        core.collective_rpc("reset_rows")


def test_windows_have_specs_of_their_own(tmp_path):
    folder = write_model_config(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=32)
    core = make_core(make_config(folder))
    assert core.executor.collective_rpc("get_kv_cache_spec")[0]["layers.1"]["sliding_window"] == 32
    add(core, "a", list(range(50)), max_tokens=14)
    assert len(drain(core)["a"][0]) == 14


def test_the_memory_is_the_hardwares(tmp_path):
    """The KV cache has 0.9 of it, less weights and activations, which are the same on both."""
    folder = write_model_config(
        tmp_path,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    config = make_config(folder, max_model_len=131072, max_num_seqs=256)
    tables = {}
    for name in ("h200", "h100"):
        core = make_core(config, hardware=name)
        (tables[name],) = core.ready.memory_bytes
        core.shutdown()
    assert tables["h200"]["total_bytes"] == HARDWARE["h200"].memory_bytes
    more = tables["h200"]["available_kv_cache_bytes"] - tables["h100"]["available_kv_cache_bytes"]
    assert more == pytest.approx(0.9 * (141e9 - 80e9), abs=2)
    given = make_core(make_config(folder, kv_cache_bytes=1 << 30, max_model_len=4096))
    assert given.ready.memory_bytes[0]["available_kv_cache_bytes"] == 1 << 30


def test_the_factory_of_the_workers(model_folder):
    with pytest.raises(ConfigError, match=r"worker_extension=.m\.C.: a fake worker takes none"):
        FakeExecutor(make_config(model_folder, worker_extension="m.C"))
    with pytest.raises(ConfigError, match="give no tokens and no cost"):
        FakeExecutor(make_config(model_folder), worker_factory="m:f", cost=StepCost())
    with pytest.raises(ConfigError, match="hardware='h300'"):
        FakeExecutor(make_config(model_folder), hardware="h300")


def test_its_names():
    assert executor_class("ringcore.testing:FakeExecutor") is FakeExecutor


def test_a_fault_needs_a_kind_and_an_end(model_folder):
    with pytest.raises(ConfigError, match="kind='deaht': give one of death, error"):
        Fault(step=1, kind="deaht")
    with pytest.raises(ConfigError, match="step=-1"):
        Fault(step=-1, kind="death")
    with pytest.raises(ConfigError, match=r"seconds=-1\.0"):
        Fault(step=1, kind="slow", seconds=-1.0)
    config = make_config(model_folder, step_timeout_s=None)
    with pytest.raises(ConfigError, match="nothing ever ends it"):
        FakeExecutor(config, faults=[Fault(step=1, kind="hang")])
    with pytest.raises(ConfigError, match="two faults are in one step"):
        FakeExecutor(config, faults=[Fault(step=1, kind="slow"), Fault(step=1, kind="death")])
