"""SmolLM2-135M on the CPU sleeps, wakes and gets new weights: the tokens of the reference, the memory given back."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from new_weights import OtherWeights
from sleeping import (
    AWAKE,
    OPTIONS,
    PROMPTS,
    check_all_lengths,
    check_no_growth,
    check_tokens,
    expected,
    generating,
    greedy,
    holdings,
    resident_bytes,
    token_ids,
    wait_until,
    weights_bytes,
)

from ringcore import LLM, ParkedEngines
from ringcore.errors import InvalidRequestError, SleepingError
from ringcore.weights import WeightGroup

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

CACHED = len(PROMPTS[-1]) // 16 * 16 - 16  # of the longest prompt, 33 tokens, at least


@pytest.fixture(scope="module")
def engine(smollm2):
    """One that was parked, and is adopted: it is as any other from then on."""
    options = OPTIONS | {"max_worker_restarts": 1}
    with ParkedEngines(smollm2, level=1, **options) as parked:
        parked.wait()
        one = LLM(smollm2, start_from="parked_only", **options)
    with one:
        yield one


@pytest.fixture
def llm(engine, smollm2):
    """Awake, with the checkpoint's weights; and so again when the test is over."""
    yield engine
    engine.wake_up()
    if engine.health().memory["weights"] == "stale":
        engine.reload_weights(smollm2)


@pytest.fixture
def trained(llm, smollm2):
    """One whose weights the test replaces."""
    yield llm
    llm.reload_weights(smollm2)


@pytest.fixture(scope="module")
def other(smollm2):
    return OtherWeights(smollm2)


class TestSleep:
    @pytest.mark.long_form
    def test_the_reference_with_weights_that_are_not_packed(self, llm):
        check_all_lengths(llm)

    @pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long_form), 2])
    def test_the_same_tokens_afterwards_and_a_cold_prefix_cache(self, llm, smollm2, level):
        check_tokens(llm)
        assert check_tokens(llm)[-1].num_cached_tokens >= CACHED
        before = resident_bytes(llm)
        report = llm.sleep(level)
        away = {"weights": "offloaded" if level == 1 else "discarded", "kv_cache": "discarded"}
        assert report.states == away
        assert report.ranks[0]["weights_freed_bytes"] >= weights_bytes(llm)
        assert report.ranks[0]["kv_cache_freed_bytes"] >= 0.99 * OPTIONS["kv_cache_bytes"]
        assert llm.is_sleeping()
        assert (llm.health().state, llm.health().memory) == ("sleeping", away)
        assert llm.collective_rpc("memory_states", unique_reply_rank=0) == away
        if level == 2:
            assert before - resident_bytes(llm) >= 0.9 * weights_bytes(llm)
        assert llm.sleep(level).ranks == []  # again: nothing happens
        assert llm.wake_up().states == AWAKE | ({"weights": "stale"} if level == 2 else {})
        if level == 2:
            llm.reload_weights(smollm2)
        assert not llm.is_sleeping()
        assert (llm.health().state, llm.health().memory) == ("ready", AWAKE)
        assert [output.num_cached_tokens for output in check_tokens(llm)] == [0] * len(PROMPTS)
        assert check_tokens(llm)[-1].num_cached_tokens >= CACHED

    @pytest.mark.long_form  # every time with two ranks in `test_sleep_shapes`
    @pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
    def test_the_tags_wake_in_either_order(self, llm, tags):
        llm.sleep()
        for index, tag in enumerate(tags):
            assert llm.is_sleeping()
            with pytest.raises(SleepingError, match=tags[1]):
                llm.generate(PROMPTS[0], greedy(1), use_tqdm=False)
            assert llm.wake_up([tag]).states[tag] == "resident"
            assert len(llm.wake_up([tag]).ranks) == 0
            assert llm.is_sleeping() == (index == 0)
        check_tokens(llm)

    def test_requests_are_refused_with_the_remedy(self, llm):
        def refused(remedy, tags):
            with pytest.raises(SleepingError, match=remedy) as caught:
                llm.generate(PROMPTS, greedy(1), use_tqdm=False)
            assert sorted(caught.value.details["tags"]) == tags
            for output in llm.generate(PROMPTS, greedy(1), use_tqdm=False, on_error="return"):
                assert isinstance(output.error, SleepingError)
                assert output.outputs == []

        llm.sleep(2)
        refused(r"wake_up\(\)", ["kv_cache", "weights"])
        with pytest.raises(SleepingError, match=r"wake_up\(\['weights'\]\)"):
            llm.start_weight_update()
        llm.wake_up()
        refused(r"reload_weights\(path\)", ["weights"])
        assert llm.health().state == "sleeping"
        llm.start_weight_update()
        refused(r"finish_weight_update\(\)", ["weights"])

    @pytest.mark.long_form
    def test_again_and_again_without_growth(self, llm):
        def cycle(num_times):
            for _ in range(num_times):
                llm.sleep()
                llm.wake_up()
            check_tokens(llm, 2)
            return holdings(llm)

        check_no_growth(cycle(1), cycle(5), 8 << 20)


class TestRunningRequests:
    @pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.long_form), 1])
    def test_kept_ones_have_the_tokens_of_an_undisturbed_run(self, llm, level):
        with generating(llm) as outputs:
            llm.sleep(level, mode="keep")
            health = llm.health()
            assert health.state == "sleeping"
            assert health.num_running + health.num_waiting == len(PROMPTS)
            llm.wake_up()
        assert token_ids(outputs) == expected(24)

    @pytest.mark.long_form
    def test_they_go_on_with_new_weights(self, llm, smollm2):
        """The same ones, by all means of new ones."""
        with generating(llm) as outputs:
            assert llm.reload_weights(smollm2).ranks[0]["num_tensors"] > 200
        assert token_ids(outputs) == expected(24)
        assert all(output.metrics.num_preemptions for output in outputs)

    @pytest.mark.long_form  # every time in tests/engine_core/test_engine_sleep
    def test_those_that_are_waited_for_finish_first(self, llm):
        with generating(llm, 12) as outputs:
            llm.sleep(1, mode="wait")
            assert llm.health().num_running + llm.health().num_waiting == 0
        assert token_ids(outputs) == expected(12)

    @pytest.mark.long_form
    def test_aborted_ones_end_with_what_they_have(self, llm):
        with generating(llm) as outputs:
            llm.sleep(1)
        for output, whole in zip(outputs, expected(24), strict=True):
            got = output.outputs[0]
            assert got.finish_reason == "abort"
            assert got.token_ids == whole[: len(got.token_ids)]
            assert 0 < len(got.token_ids) < 24


@pytest.mark.long_form  # every time: tiny models in `test_sleep_shapes`, a trainer in tests/worker
class TestNewWeights:
    def test_tensors_of_the_host_in_several_chunks(self, trained, other, smollm2):
        trained.start_weight_update()
        for chunk in other.chunks(3):
            assert trained.update_weights(chunk).ranks[0]["num_tensors"] == len(chunk)
        assert trained.health().memory["weights"] == "stale"
        assert trained.finish_weight_update().states == AWAKE
        other.check(trained)
        trained.sleep()  # they are kept like any others
        trained.wake_up()
        other.check(trained)
        assert trained.reload_weights(smollm2).states == AWAKE
        check_tokens(trained)

    @pytest.mark.parametrize("wrong", ["name", "shape"])
    def test_a_chunk_that_fails_leaves_them_stale(self, trained, other, smollm2, wrong):
        name = "model.layers.3.mlp.up_proj.weight"
        chunk = {"model.layers.99.mlp.up_proj.weight" if wrong == "name" else name: other.tensors[name][:-1]}
        trained.start_weight_update()
        trained.update_weights({name: other.tensors[name]})
        with pytest.raises(InvalidRequestError, match=rf"{next(iter(chunk))}.*stale.*reload_weights"):
            trained.update_weights(chunk)
        assert trained.health().memory["weights"] == "stale"
        with pytest.raises(SleepingError, match="reload_weights"):
            trained.generate(PROMPTS[0], greedy(1), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="start_weight_update"):
            trained.update_weights({name: other.tensors[name]})
        trained.reload_weights(smollm2)
        check_tokens(trained)

    def test_stale_weights_need_all_of_them(self, trained, other):
        trained.sleep(2)
        trained.wake_up()
        trained.start_weight_update()
        missing, *given = other.tensors
        trained.update_weights({name: other.tensors[name] for name in given})
        with pytest.raises(InvalidRequestError, match=missing):
            trained.finish_weight_update()
        assert trained.health().memory["weights"] == "stale"
        trained.start_weight_update()
        trained.update_weights(other.tensors)
        trained.finish_weight_update()
        other.check(trained)

    def test_a_trainer_broadcasts_them(self, trained, other):
        with WeightGroup("127.0.0.1", 0, world_size=2, backend="gloo", timeout_s=90) as group:
            trainer = threading.Thread(
                target=lambda: [group.broadcast(chunk) for chunk in other.chunks(2)], daemon=True
            )
            trainer.start()
            trained.collective_rpc("join_weight_group", ("127.0.0.1", group.port, 2, 1, "gloo", 90.0), timeout=90)
            trained.start_weight_update()
            for chunk in other.chunks(2):
                trained.update_weights({"kind": "group", "tensors": group.describe(chunk)}, timeout=90)
            trained.finish_weight_update()
            trainer.join(90)
            assert not trainer.is_alive()
            trained.collective_rpc("leave_weight_group", timeout=90)
        other.check(trained)


def test_a_worker_is_killed_while_it_sleeps(llm):
    away = llm.sleep().states
    pid = llm.health().ranks[0].pid
    os.kill(pid, signal.SIGKILL)

    def sleeps_again():
        health = llm.health()
        return health.num_restarts == 1 and health.state == "sleeping" and health.memory == away

    wait_until(sleeps_again)
    assert llm.health().ranks[0].pid != pid
    assert llm.collective_rpc("memory_states", unique_reply_rank=0, timeout=90) == away
    with pytest.raises(SleepingError):
        llm.generate(PROMPTS[0], greedy(1), use_tqdm=False)
    llm.wake_up()
    check_tokens(llm)


@pytest.mark.long_form
def test_parked_without_weights(smollm2):
    """They are read again when it is adopted."""
    with ParkedEngines(smollm2, level=2, **OPTIONS) as parked:
        parked.wait()
        with LLM(smollm2, start_from="parked_only", **OPTIONS) as llm:
            assert llm.health().memory == AWAKE
            check_tokens(llm)
