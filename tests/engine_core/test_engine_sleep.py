"""Sleep, wake-up and new weights of an engine in this process: requests before, meanwhile and after, and failures."""

from __future__ import annotations

import pytest
from fake_engine import expected, make_model_folder
from mortal_executor import MortalExecutor

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import (
    CapacityError,
    EngineDeadError,
    InvalidRequestError,
    RingcoreError,
    RpcTimeoutError,
    SleepingError,
    WorkerDiedError,
    WorkerError,
)
from ringcore.protocol.operations import Sleep, WakeUp, operation_of
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing import FakeExecutor

AWAKE = {"weights": "resident", "kv_cache": "resident"}
PROMPTS = {f"r{i}": [i + 1] * length for i, length in enumerate([1, 4, 17, 20])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_config(folder, **options):
    defaults = {
        "max_model_len": 64,
        "block_size": 4,
        "enable_sleep_mode": True,
        "device_memory": "auto",
        "steps_in_flight": 2,
    }
    return EngineConfig.from_options(model=folder, load_format="dummy", **(defaults | options))


def make_core(folder, holds=False, **options):
    config = make_config(folder, **options)
    return EngineCore(config, MortalExecutor(config, holds=holds))


def worker_of(core):
    return core._executor.worker


def request(request_id, prompt, **params):
    return EngineCoreRequest(request_id, prompt, SamplingParams(**({"max_tokens": 6} | params)), arrival_s=0.0)


def add_all(core):
    for request_id, prompt in PROMPTS.items():
        core.add_request(request(request_id, prompt))


def steps(core, num_steps):
    return [output for _ in range(num_steps) for output in core.step().outputs]


def drain(core, max_steps=1000):
    outputs = []
    while core.has_unfinished:
        outputs += core.step().outputs
        core._scheduler.check()
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    return outputs


def tokens(outputs, request_id):
    return [t for output in outputs if output.request_id == request_id for t in output.new_token_ids]


def reasons(outputs):
    return {output.request_id: output.finish_reason for output in outputs if output.finish_reason}


def check_serves(core, weights=0):
    core.add_request(request("after", [7, 8, 9]))
    assert tokens(drain(core), "after") == expected([7, 8, 9], 6, weights)


depths = pytest.mark.parametrize("depth", [1, 2])
held = pytest.mark.parametrize("holds", [False, True])


class TestRequests:
    @depths
    @held
    @pytest.mark.parametrize("level", [0, 1])
    @pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
    def test_kept_ones_have_the_same_tokens(self, folder, depth, holds, level, num_steps):
        core = make_core(folder, holds, steps_in_flight=depth, max_num_batched_tokens=16)
        add_all(core)
        outputs = steps(core, num_steps)
        core.sleep(level, mode="keep")
        assert core.num_in_flight == 0
        outputs += drain(core)  # what came in while it was waited for
        assert not core.has_unfinished
        assert core.is_sleeping()
        core.wake_up()
        outputs += drain(core)
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    @depths
    @held
    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_those_that_are_waited_for_finish_first(self, folder, depth, holds, level):
        core = make_core(folder, holds, steps_in_flight=depth, max_num_batched_tokens=16)
        add_all(core)
        outputs = steps(core, 2)
        core.sleep(level, mode="wait")
        assert core.stats().num_running + core.stats().num_waiting == 0
        outputs += drain(core)
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    @depths
    @held
    def test_aborted_ones_end_with_what_they_have(self, folder, depth, holds):
        core = make_core(folder, holds, steps_in_flight=depth, max_num_batched_tokens=16)
        add_all(core)
        outputs = steps(core, 4)
        core.sleep(1)
        outputs += drain(core)
        assert reasons(outputs) == dict.fromkeys(PROMPTS, "abort")
        for request_id, prompt in PROMPTS.items():
            got = tokens(outputs, request_id)
            assert got == expected(prompt, 6)[: len(got)]
        core.wake_up()
        check_serves(core)

    def test_the_engine_is_idle_only_where_its_workers_could_compute(self, folder):
        core = make_core(folder)
        assert core.is_idle
        core.add_request(request("a", [1]))
        assert not core.is_idle
        drain(core)
        assert core.is_idle
        for level in (0, 1, 2):
            core.sleep(level)
            assert not core.is_idle
            core.wake_up()
            assert core.is_idle is (level < 2)  # after level 2 the weights are stale
        core.start_weight_update()
        assert not core.is_idle
        core.update_weights({"kind": "number", "number": 3})
        assert not core.is_idle
        core.finish_weight_update()
        assert core.is_idle
        operation = core.submit_operation(Sleep(1))
        assert not core.is_idle
        operation.result()

    def test_meanwhile_they_are_refused_and_with_level_0_they_queue(self, folder):
        core = make_core(folder)
        core.sleep(1)
        with pytest.raises(SleepingError, match=r"wake_up\(\)"):
            core.add_request(request("a", [1]))
        core.wake_up()
        core.sleep(0)
        core.add_request(request("b", [1]))
        assert not core.has_unfinished
        assert core.advance() is None
        core.resume()  # ends a pause, and no sleep
        assert not core.has_unfinished
        core.wake_up()
        assert tokens(drain(core), "b") == expected([1], 6)

    def test_those_that_come_while_others_are_waited_for_are_refused(self, folder):
        core = make_core(folder, holds=True)
        add_all(core)
        operation = core.submit_operation(Sleep(1, "wait"))
        assert not operation.done()
        with pytest.raises(SleepingError, match="about to sleep"):
            core.add_request(request("late", [1]))
        outputs = drain(core)
        assert operation.result().states == {"weights": "offloaded", "kv_cache": "discarded"}
        assert set(reasons(outputs)) == set(PROMPTS)

    def test_waiting_behind_a_pause_is_refused(self, folder):
        core = make_core(folder)
        core.pause("all")
        add_all(core)
        with pytest.raises(InvalidRequestError, match="4 requests are unfinished and the engine is paused"):
            core.sleep(1, mode="wait")
        core.resume()
        assert set(reasons(drain(core))) == set(PROMPTS)

    def test_the_prefix_cache_is_forgotten(self, folder):
        core = make_core(folder)
        prompt = list(range(1, 21))
        for request_id in ("a", "b"):
            core.add_request(request(request_id, prompt))
            outputs = drain(core)
        assert outputs[0].num_cached_tokens
        core.sleep(1)
        core.wake_up()
        core.add_request(request("c", prompt))
        assert not drain(core)[0].num_cached_tokens

    def test_level_0_keeps_it(self, folder):
        core = make_core(folder)
        prompt = list(range(1, 21))
        core.add_request(request("a", prompt))
        drain(core)
        core.sleep(0)
        core.wake_up()
        core.add_request(request("b", prompt))
        assert drain(core)[0].num_cached_tokens


class TestStates:
    def test_what_is_told(self, folder):
        core = make_core(folder)
        report = core.sleep()
        assert report.states == {"weights": "offloaded", "kv_cache": "discarded"} == core.health().memory
        assert report.ranks == [{"copied_bytes": 10.0, "residue_bytes": 5.0}]
        assert report.seconds >= 0
        assert (core.health().state, core.is_sleeping(), core.stats().is_sleeping) == ("sleeping", True, True)
        assert worker_of(core).memory == report.states
        assert core.wake_up(["weights"]).states == {"weights": "resident", "kv_cache": "discarded"}
        assert core.is_sleeping()
        assert core.wake_up(["kv_cache"]).states == AWAKE
        assert (core.health().state, core.is_sleeping(), core.stats().is_sleeping) == ("ready", False, False)
        check_serves(core)

    def test_again_changes_nothing(self, folder):
        core = make_core(folder)
        core.sleep(1)
        worker_of(core).memory_calls.clear()
        assert core.sleep(1).ranks == []
        core.wake_up()
        worker_of(core).memory_calls.clear()
        assert core.wake_up().states == AWAKE
        assert core.wake_up(["weights"]).states == AWAKE
        assert worker_of(core).memory_calls == []
        check_serves(core)

    def test_requests_kept_through_a_deeper_sleep(self, folder):
        core = make_core(folder)
        add_all(core)
        outputs = steps(core, 3)
        core.sleep(1, "keep")
        core.sleep(2, "keep")
        core.wake_up()
        core.reload_weights("0")
        outputs += drain(core)
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    @pytest.mark.parametrize(
        ("name", "args", "match"),
        [
            ("sleep", (3,), "level=3: give 0"),
            ("sleep", (1, "now"), "mode='now': give one of 'abort', 'wait', 'keep'"),
            ("sleep", (1, "keep", 5), "wrong"),
            ("wake_up", (["weight"],), "tags="),
            ("wake_up", ([],), "tags="),
            ("start_weight_update", ("never",), "mode='never'"),
            ("reload_weights", ("",), "path=''"),
            ("reload_weights", (), "wrong"),
        ],
    )
    def test_wrong_arguments(self, folder, name, args, match):
        core = make_core(folder)
        with pytest.raises(InvalidRequestError, match=match):
            core.collective_rpc(name, args)
        with pytest.raises(InvalidRequestError, match=match):
            operation_of(name, args, {})
        check_serves(core)

    def test_wrong_arguments_of_the_methods(self, folder):
        core = make_core(folder)
        for call, match in (
            (lambda: core.sleep(True), "level=True: give 0"),
            (lambda: core.sleep(0, "now"), "mode='now'"),
            (lambda: core.wake_up("weights"), "tags='weights'"),
            (lambda: core.start_weight_update("never"), "mode='never'"),
            (lambda: core.reload_weights(""), "path=''"),
        ):
            with pytest.raises(InvalidRequestError, match=match):
                call()
        check_serves(core)

    def test_without_the_option(self, folder):
        core = make_core(folder, enable_sleep_mode=False)
        for level in (1, 2):
            with pytest.raises(InvalidRequestError, match="enable_sleep_mode=True"):
                core.sleep(level)
        core.sleep(0)
        core.wake_up()
        check_serves(core)

    def test_as_calls_to_the_workers(self, folder):
        core = make_core(folder)
        assert core.collective_rpc("sleep", (1,)) == [{"copied_bytes": 10.0, "residue_bytes": 5.0}]
        assert core.collective_rpc("memory_states") == [{"weights": "offloaded", "kv_cache": "discarded"}]
        assert core.collective_rpc("sleep", kwargs={"level": 1}) == [{}]
        assert core.collective_rpc("wake_up", unique_reply_rank=0)["residue_bytes"] == 5.0
        for method in ("prepare_memory", "commit_memory", "roll_back_memory"):
            with pytest.raises(InvalidRequestError, match="call one of sleep, wake_up instead"):
                core.collective_rpc(method)
        with pytest.raises(InvalidRequestError, match="unique_reply_rank=1"):
            core.collective_rpc("sleep", unique_reply_rank=1)
        check_serves(core)

    def test_one_after_the_other(self, folder):
        core = make_core(folder, holds=True)
        add_all(core)
        steps(core, 1)
        operations = [core.submit_operation(what) for what in (Sleep(1, "keep"), WakeUp(), Sleep(2))]
        drain(core)
        assert [operation.result().states["weights"] for operation in operations] == [
            "offloaded",
            "resident",
            "discarded",
        ]

    def test_a_caller_may_give_up(self, folder):
        core = make_core(folder, holds=True)
        add_all(core)
        operation = core.submit_operation(Sleep(1, "wait"), timeout=0.0)
        with pytest.raises(RpcTimeoutError, match=r"'sleep' took longer than 0.0 s; the engine still finishes it"):
            operation.result()
        drain(core)
        assert core.health().memory["weights"] == "offloaded"


class TestFailures:
    @pytest.mark.parametrize("mode", ["keep", "abort"])
    def test_a_sleep_that_cannot_be_prepared_leaves_everything_as_it_was(self, folder, mode):
        core = make_core(folder)
        add_all(core)
        outputs = steps(core, 3)
        worker = worker_of(core)
        worker.failing["prepare_memory"] = CapacityError("no memory", needed_bytes=7, available_bytes=3)
        with pytest.raises(CapacityError) as caught:
            core.sleep(1, mode)
        assert (caught.value.details["needed_bytes"], caught.value.details["available_bytes"]) == (7, 3)
        assert worker.memory_calls == ["prepare_memory", "roll_back_memory"]
        assert core.health().memory == AWAKE
        outputs += drain(core)
        if mode == "keep":
            for request_id, prompt in PROMPTS.items():
                assert tokens(outputs, request_id) == expected(prompt, 6)
        check_serves(core)

    def test_a_wake_up_that_cannot_be_prepared_succeeds_later(self, folder):
        core = make_core(folder)
        add_all(core)
        outputs = steps(core, 3)
        core.sleep(1, "keep")
        worker_of(core).failing["prepare_memory"] = CapacityError("too little memory", needed_bytes=7)
        with pytest.raises(CapacityError, match="too little memory"):
            core.wake_up()
        assert core.health().memory == {"weights": "offloaded", "kv_cache": "discarded"}
        with pytest.raises(SleepingError):
            core.add_request(request("a", [1]))
        core.wake_up()
        outputs += drain(core)
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    @pytest.mark.parametrize("method", ["commit_memory", "roll_back_memory"])
    def test_what_must_not_fail_costs_the_workers(self, folder, method):
        core = make_core(folder, max_worker_restarts=1)
        add_all(core)
        outputs = steps(core, 2)
        worker = worker_of(core)
        worker.failing["prepare_memory" if method == "roll_back_memory" else ""] = CapacityError("no memory")
        worker.failing[method] = WorkerError("an unmapping failed")
        with pytest.raises(RingcoreError):
            core.sleep(1, "keep")
        outputs += drain(core)
        assert core.num_restarts == 1
        assert core.health().memory == AWAKE
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    def test_without_a_restart_left_it_is_the_end(self, folder):
        core = make_core(folder)
        worker_of(core).failing["commit_memory"] = WorkerError("an unmapping failed")
        with pytest.raises(EngineDeadError, match="an unmapping failed"):
            core.sleep(1)
        with pytest.raises(EngineDeadError, match="an unmapping failed"):
            core.step()

    def test_one_rank_of_two(self, folder):
        config = make_config(folder, tensor_parallel_size=2)
        core = EngineCore(config, FakeExecutor(config, worker_factory="fake_engine:create_worker"))
        first, second = core._executor._workers
        second.failing["prepare_memory"] = CapacityError("no memory", needed_bytes=7)
        with pytest.raises(CapacityError) as caught:
            core.sleep(1)
        assert list(caught.value.failures) == [1]
        assert [worker.memory_calls[-1] for worker in (first, second)] == ["roll_back_memory"] * 2
        assert first.memory == second.memory == AWAKE
        report = core.sleep(2)
        assert [rank["copied_bytes"] for rank in report.ranks] == [10.0, 11.0]
        assert core.collective_rpc("wake_up", (["weights"],)) == [
            {"copied_bytes": 10.0, "residue_bytes": 5.0},
            {"copied_bytes": 11.0, "residue_bytes": 5.0},
        ]
        core.shutdown()


class TestUpdates:
    def update(self, core, number, **kwargs):
        core.start_weight_update(**kwargs)
        core.update_weights({"kind": "ipc", "number": number})
        return core.finish_weight_update()

    @depths
    @held
    def test_requests_go_on_with_the_new_weights(self, folder, depth, holds):
        core = make_core(folder, holds, steps_in_flight=depth)
        worker_of(core).possible_weights.add(5)
        core.add_request(request("a", [1, 2, 3]))
        outputs = steps(core, 3)
        core.start_weight_update()
        outputs += drain(core)
        before = tokens(outputs, "a")
        assert before == expected([1, 2, 3], len(before))
        assert core.health().memory == {"weights": "stale", "kv_cache": "resident"}
        assert (core.health().state, core.is_sleeping(), core.stats().is_sleeping) == ("sleeping", False, True)
        with pytest.raises(SleepingError, match="finish_weight_update"):
            core.add_request(request("b", [1]))
        core.update_weights({"kind": "ipc", "number": 5})
        core.finish_weight_update()
        outputs += drain(core)
        assert tokens(outputs, "a") == before + expected([1, 2, 3, *before], 6 - len(before), 5)
        check_serves(core, 5)

    def test_the_prefix_cache_is_forgotten(self, folder):
        core = make_core(folder)
        prompt = list(range(1, 21))
        core.add_request(request("a", prompt))
        drain(core)
        self.update(core, 3)
        core.add_request(request("b", prompt))
        assert not drain(core)[0].num_cached_tokens

    def test_after_a_sleep_of_level_2_all_weights_must_come(self, folder):
        core = make_core(folder)
        core.sleep(2)
        with pytest.raises(SleepingError, match=r"call wake_up\(\['weights'\]\) first"):
            core.start_weight_update()
        core.wake_up(["weights"])
        with pytest.raises(SleepingError):
            core.add_request(request("a", [1]))
        core.start_weight_update()
        with pytest.raises(InvalidRequestError, match="'x' is missing; the update has failed and"):
            core.finish_weight_update()
        self.update(core, 4)
        assert core.health().memory == {"weights": "resident", "kv_cache": "discarded"}
        core.wake_up()
        check_serves(core, 4)

    def test_one_that_begins_with_good_weights_may_bring_a_few(self, folder):
        core = make_core(folder)
        core.start_weight_update()
        core.finish_weight_update()
        check_serves(core)

    @pytest.mark.parametrize("method", ["update_weights", "finish_weight_update"])
    def test_one_that_fails_leaves_them_stale(self, folder, method):
        core = make_core(folder)
        add_all(core)
        outputs = steps(core, 2)
        worker_of(core).failing[method] = InvalidRequestError("no tensor 'y'", field="tensors", value="y")
        worker_of(core).possible_weights.add(6)
        with pytest.raises(InvalidRequestError, match=r"no tensor 'y'; .* stale: .* reload_weights") as caught:
            self.update(core, 6)
        assert caught.value.details["value"] == "y"
        with pytest.raises(SleepingError, match="the weights are stale: call reload_weights"):
            core.add_request(request("b", [1]))
        with pytest.raises(InvalidRequestError, match=r"call start_weight_update\(\) first"):
            core.update_weights({"kind": "ipc", "number": 6})
        core.start_weight_update()
        with pytest.raises(InvalidRequestError, match="missing"):
            core.finish_weight_update()  # what it began with was of no use
        core.reload_weights("6")
        assert set(reasons(outputs + drain(core))) == set(PROMPTS)
        check_serves(core, 6)

    def test_one_that_cannot_begin_changes_nothing(self, folder):
        core = make_core(folder)
        worker_of(core).failing["start_weight_update"] = InvalidRequestError("no place", field="x")
        with pytest.raises(InvalidRequestError, match=r"no place$"):
            core.start_weight_update()
        check_serves(core)

    def test_no_two_at_a_time(self, folder):
        core = make_core(folder)
        core.start_weight_update()
        with pytest.raises(InvalidRequestError, match="in progress"):
            core.start_weight_update()
        core.reload_weights("2")  # gives the first one up
        with pytest.raises(InvalidRequestError, match="no weight update"):
            core.finish_weight_update()
        check_serves(core, 2)

    def test_sleep_gives_one_up(self, folder):
        core = make_core(folder)
        core.start_weight_update()
        assert core.sleep(1).states["weights"] == "discarded"
        core.wake_up()
        core.reload_weights("3")
        check_serves(core, 3)

    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    def test_modes(self, folder, mode):
        core = make_core(folder)
        worker_of(core).possible_weights.add(9)
        add_all(core)
        outputs = steps(core, 2)
        self.update(core, 9, mode=mode)
        outputs += drain(core)
        assert set(reasons(outputs).values()) == {"abort" if mode == "abort" else "length"}
        if mode == "wait":
            for request_id, prompt in PROMPTS.items():
                assert tokens(outputs, request_id) == expected(prompt, 6)

    def test_as_calls_to_the_workers(self, folder):
        core = make_core(folder)
        core.collective_rpc("start_weight_update")
        assert core.collective_rpc("update_weights", ({"kind": "ipc", "number": 8},)) == [{"num_tensors": 1.0}]
        core.collective_rpc("finish_weight_update")
        check_serves(core, 8)


class TestDeaths:
    """The workers die, and new ones come with the checkpoint's weights, and awake."""

    def dies(self, core):
        core._executor.die()
        core.check_workers()
        return drain(core)

    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_of_an_engine_that_sleeps(self, folder, level):
        core = make_core(folder, max_worker_restarts=3)
        add_all(core)
        outputs = steps(core, 3)
        states = core.sleep(level, "keep").states
        outputs += self.dies(core)
        assert core.health().memory == states == (worker_of(core).memory | states)
        assert core.is_sleeping()
        core.wake_up()
        if level == 2:
            core.reload_weights("0")
        outputs += drain(core)
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    def test_of_weights_that_came_from_a_folder(self, folder):
        core = make_core(folder, max_worker_restarts=1)
        core.reload_weights("/models/5")
        self.dies(core)
        assert core.health().state == "ready"
        check_serves(core, 5)

    def test_of_weights_that_came_from_a_folder_and_sleep(self, folder):
        core = make_core(folder, max_worker_restarts=1)
        core.reload_weights("/models/5")
        core.sleep(1)
        self.dies(core)
        assert core.health().memory == {"weights": "offloaded", "kv_cache": "discarded"}
        core.wake_up()
        check_serves(core, 5)

    @pytest.mark.parametrize("is_asleep", [False, True])
    def test_of_weights_that_nobody_can_bring_again(self, folder, is_asleep):
        core = make_core(folder, max_worker_restarts=1)
        TestUpdates().update(core, 7)
        if is_asleep:
            core.sleep(1)
        self.dies(core)
        if is_asleep:
            assert core.health().memory == {"weights": "discarded", "kv_cache": "discarded"}
            core.wake_up()
        assert core.health().memory == {"weights": "stale", "kv_cache": "resident"}
        with pytest.raises(SleepingError, match="stale"):
            core.add_request(request("a", [1]))
        TestUpdates().update(core, 7)
        check_serves(core, 7)

    @pytest.mark.parametrize("noticed", [False, True])
    @pytest.mark.parametrize("method", ["prepare_memory", "commit_memory"])
    @pytest.mark.parametrize("what", ["sleep", "wake_up"])
    def test_in_the_middle(self, folder, what, method, noticed):
        core = make_core(folder, max_worker_restarts=1)
        add_all(core)
        outputs = steps(core, 3)
        if what == "wake_up":
            core.sleep(1, "keep")
        executor, worker = core._executor, worker_of(core)
        called = worker._called

        def die_in(name):
            called(name)
            if name == method:
                executor.die(noticed=noticed)

        worker._called = die_in
        operation = core.submit_operation(operation_of(what, (1, "keep") if what == "sleep" else (), {}))
        with pytest.raises(WorkerDiedError):
            operation.result()
        core.check_workers()
        outputs += drain(core)
        if core.is_sleeping():
            core.wake_up()
        outputs += drain(core)
        assert core.num_restarts == 1
        for request_id, prompt in PROMPTS.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)

    def test_the_end_is_the_end(self, folder):
        core = make_core(folder)
        core.sleep(1)
        core.shutdown()
        with pytest.raises(EngineDeadError):
            core.wake_up()
        assert core.health().state == "dead"
