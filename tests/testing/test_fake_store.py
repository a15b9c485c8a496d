"""Engines whose evicted blocks go to a store, without a model: recovery, pauses, sleep, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_engine import make_model_folder
from fake_engines import add, drain, make_config, make_core
from prometheus_client import generate_latest

from ringcore import LLM, SamplingParams
from ringcore.metrics import RequestLog
from ringcore.metrics.exposition import ObservedEngine, make_registry
from ringcore.protocol.requests import NO_STATS
from ringcore.testing import Fault, StepCost

PROMPTS = [[i + 1] * 40 for i in range(4)]  # ten blocks each, in a cache of 24
OPTIONS = {"num_blocks_override": 25, "steps_in_flight": 2}


def turns(core, num: int = 12) -> dict[str, tuple]:
    got = {}
    for number in range(num):
        add(core, f"turn {number}", PROMPTS[number % 4], seed=number % 4)
        got |= drain(core)
    return got


@pytest.fixture(scope="module")
def without(model_folder):
    return turns(make_core(make_config(model_folder, **OPTIONS)))


def make(folder, **options):
    given = {name: options.pop(name) for name in ("faults", "cost") if name in options}
    return make_core(make_config(folder, **OPTIONS, host_kv_cache_bytes=1 << 20, **options), **given)


def test_turns_and_their_metrics(model_folder, without):
    core = make(model_folder)
    core.step_metrics()
    assert turns(core) == without
    found = core.step_metrics().stored_kv
    assert found.num_hit_tokens > 200
    assert found.num_blocks
    assert min(found.saved_bytes, found.loaded_bytes) > 0  # what is stored is not saved again
    source = SimpleNamespace(
        stats=NO_STATS,
        ready=None,
        num_restarts=0,
        step_metrics=core.step_metrics,
    )
    prompts = SimpleNamespace(num_jobs=0, num_refused=0)
    text = generate_latest(make_registry([ObservedEngine(source, RequestLog())], prompts, "m")).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['vllm:external_prefix_cache_hits_total{engine="0",model_name="m"}']) == found.num_hit_tokens
    assert float(lines['ringcore:stored_kv_saved_bytes_total{engine="0",model_name="m"}']) == found.saved_bytes
    assert float(lines['ringcore:stored_kv_loaded_bytes_total{engine="0",model_name="m"}']) == found.loaded_bytes
    assert float(lines['ringcore:stored_kv_blocks{engine="0",model_name="m"}']) == found.num_blocks
    assert 'ringcore:stored_kv_failed_blocks_total{engine="0",model_name="m"}' in lines
    assert 'ringcore:stored_kv_load_seconds_total{engine="0",model_name="m"}' in lines
    for level in ("memory", "directory"):
        assert f'ringcore:stored_kv_level_loaded_bytes_total{{engine="0",level="{level}",model_name="m"}}' in lines
    assert lines['ringcore:stored_kv_lost_directories{engine="0",model_name="m"}'] == "0.0"
    assert lines['ringcore:stored_kv_unwritten_blocks_total{engine="0",model_name="m"}'] == "0.0"
    assert lines['ringcore:stored_kv_broken_files_total{engine="0",model_name="m"}'] == "0.0"
    assert make_core(make_config(model_folder, **OPTIONS)).step_metrics().stored_kv is None


@pytest.mark.parametrize("step", [3, 20, 21, 22, 23, 24, 30])
def test_new_workers_have_an_empty_store(model_folder, without, step):
    core = make(model_folder, faults=[Fault(step=step, kind="death")], cost=StepCost(base_s=1.0), max_worker_restarts=1)
    assert turns(core) == without
    assert core.num_restarts == 1


def test_sleep_and_pause_while_it_loads(model_folder, without):
    core = make(model_folder, enable_sleep_mode=True)
    got = turns(core, 4)
    add(core, "turn 4", PROMPTS[0], seed=0)
    core.step(block=False)
    assert core.has_unfinished
    core.sleep(1, mode="keep")
    core.wake_up()
    core.pause("all")
    assert not core.has_unfinished
    core.resume()
    got |= drain(core)
    assert got == {name: without[name] for name in got}
    num_stored = core.step_metrics().stored_kv.num_blocks
    core.start_weight_update()
    assert num_stored
    assert not core.step_metrics().stored_kv.num_blocks
    core.finish_weight_update()
    add(core, "turn 5", PROMPTS[1], seed=1)
    assert drain(core)["turn 5"] == without["turn 5"]


def test_in_an_engine_process(tmp_path):
    """Its loop, which waits for a load as for a step."""
    options = {"load_format": "dummy", "executor": "ringcore.testing:FakeExecutor", "block_size": 4}
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(40)) for i in range(4)]
    params = SamplingParams(max_tokens=4, seed=1)
    with LLM(
        make_model_folder(tmp_path), **options, max_model_len=64, num_blocks_override=25, host_kv_cache_bytes=1 << 20
    ) as llm:
        first, again = ([llm.generate(text, params, use_tqdm=False)[0] for text in texts] for _ in range(2))
        assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in first]
        assert all(one.num_cached_tokens >= 36 for one in again)
