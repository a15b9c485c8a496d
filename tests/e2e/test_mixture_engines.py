"""Mixtures of experts through the whole engine in float32: the tokens of transformers, by the native class and by
transformers' modules, however the experts are divided and whatever happens to the workers."""

from __future__ import annotations

import os
import signal

import pytest
from against_transformers import GREEDY, assert_equal
from engine import generate, make_core, tokens
from reference import differences
from transformers_models import Saved, saved

from ringcore.errors import ConfigError

OPTIONS = {
    "executor": "uniproc",
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_bytes": 1 << 24,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Saved:
    return saved("qwen3_moe", tmp_path_factory.mktemp("models"))


def assert_generates(core, model: Saved) -> None:
    outputs = generate(core, [entry.prompt_token_ids for entry in model.entries], GREEDY)
    assert differences(model.entries, tokens(outputs)) == []


def assert_survives_sleeps(core, model):
    core.sleep()
    core.wake_up()
    assert_generates(core, model)
    core.sleep(2)
    core.wake_up()
    core.reload_weights(model.path)
    assert_generates(core, model)


def test_natively_in_chunks_two_steps_deep_cold_and_warm_asleep_and_updated(model):
    """`test_any_causal_lm.py` has the same by transformers' modules."""
    with make_core(model.path, steps_in_flight=2, enable_sleep_mode=True, **OPTIONS) as core:
        assert core.ready.model is not None
        assert core.ready.model.impl == "native"
        assert_equal(model, core)
        assert_survives_sleeps(core, model)


@pytest.mark.long_form
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_two_ranks_with_whole_experts_also_after_the_death_of_one(model, impl):
    """The short form has ranks as threads, in tests/model_executor/models/test_mixtures.py."""
    ranks = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 2, "expert_parallel": True}
    with make_core(model.path, model_impl=impl, max_worker_restarts=1, **ranks) as core:
        assert_generates(core, model)
        os.kill(core.ready.pids["worker 1"], signal.SIGKILL)
        assert_generates(core, model)


@pytest.mark.long_form
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_replicas_that_are_placed_anew_asleep_updated_and_after_a_death(model, impl):
    """The short form is `tests/engine_core/test_expert_balance.py`, with ranks as threads as above."""
    ranks = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 2, "expert_parallel": True}
    replicas = {"redundant_experts": 2, "expert_balance_steps": 3, "max_worker_restarts": 1, "enable_sleep_mode": True}
    with make_core(model.path, model_impl=impl, **ranks | replicas) as core:
        for _ in range(2):
            assert_generates(core, model)
        placed = core.step_metrics().experts
        assert placed is not None
        assert placed.num_placements > 0
        assert placed.moved_bytes > 0
        assert_survives_sleeps(core, model)
        os.kill(core.ready.pids["worker 1"], signal.SIGKILL)
        assert_generates(core, model)


def test_what_cannot_be_divided_is_refused_before_a_worker_starts(model, tiny_qwen2):
    with pytest.raises(ConfigError, match="a Qwen2ForCausalLM has no experts; leave it out"):
        make_core(tiny_qwen2, expert_parallel=True, **OPTIONS)
    for impl in ("native", "transformers"):
        three = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 3, "model_impl": impl}
        with pytest.raises(ConfigError, match="its 4 experts do not divide over tensor_parallel_size=3"):
            make_core(model.path, expert_parallel=True, **three)
    two = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 2}
    for number, reason in ((1, "do not divide over tensor_parallel_size=2; give 0 or"), (6, "at most 4 replicas of 4")):
        with pytest.raises(ConfigError, match=reason):
            make_core(model.path, expert_parallel=True, redundant_experts=number, **two)
    with pytest.raises(ConfigError, match="redundant_experts=2: it is of whole experts on each rank"):
        make_core(model.path, redundant_experts=2, **two)
    with pytest.raises(ConfigError, match="size 32 of an expert does not divide into 3 ranks; give expert_parallel"):
        make_core(model.path, **OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 3})
