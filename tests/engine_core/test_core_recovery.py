"""EngineCore when its workers die: new ones, the same tokens, and the end when no restart is left."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from fake_engine import KILLS, FakeMultiproc, FakeUniproc, expected, make_model_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mortal_executor import CRASHER, KILLER, MortalExecutor
from samples import num_examples

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import (
    CapacityError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    WorkerDiedError,
    error_from_wire,
)
from ringcore.executor.rpc_call import WorkerCall
from ringcore.protocol.requests import EngineCoreRequest

PAGE = 256  # bytes of a block of 4 tokens in both layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_config(folder, **options):
    defaults = {"steps_in_flight": 2, "max_model_len": 64, "block_size": 4, "max_worker_restarts": 100}
    return EngineConfig.from_options(model=folder, load_format="dummy", **(defaults | options))


def make_core(folder, on_recovery=None, holds=False, **options):
    config = make_config(folder, **options)
    return EngineCore(config, MortalExecutor(config, holds=holds), on_recovery)


def request(request_id, prompt, **params):
    return EngineCoreRequest(request_id, prompt, SamplingParams(**({"max_tokens": 6} | params)), arrival_s=0.0)


def drain(core, max_steps=2000):
    outputs = []
    while core.has_unfinished:
        outputs += core.step().outputs
        core._scheduler.check()
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    return outputs


def tokens(outputs, request_id):
    return [t for output in outputs if output.request_id == request_id for t in output.new_token_ids]


def error_of(outputs, request_id):
    (wire,) = [output.error for output in outputs if output.request_id == request_id and output.error]
    return error_from_wire({"type": wire.type, "message": wire.message, "details": wire.details})


class TestDeath:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("holds", [False, True])
    @pytest.mark.parametrize("noticed", [False, True])
    @pytest.mark.parametrize("steps_before", range(5))
    def test_at_any_step_the_tokens_are_the_models(self, folder, depth, holds, noticed, steps_before):
        core = make_core(folder, holds=holds, steps_in_flight=depth, max_num_batched_tokens=16)
        prompts = {f"r{i}": [i + 1] * length for i, length in enumerate([1, 3, 4, 17, 20])}
        for request_id, prompt in prompts.items():
            core.add_request(request(request_id, prompt))
        outputs = [output for _ in range(steps_before) for output in core.step().outputs]
        core._executor.die(noticed=noticed)
        outputs += drain(core)
        for request_id, prompt in prompts.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)
        assert core.num_restarts == 1

    def test_an_error_in_a_step_costs_the_workers_too(self, folder):
        core = make_core(folder, max_worker_restarts=2)
        core.add_request(request("bad", [1, CRASHER + 5]))
        core.add_request(request("good", [2] * 5))
        outputs = drain(core)
        assert tokens(outputs, "bad") == expected([1, CRASHER + 5], 3)
        error = error_of(outputs, "bad")
        assert isinstance(error, WorkerDiedError)
        assert "a step failed: ZeroDivisionError: the forward pass failed" in error.message
        assert tokens(outputs, "good") == expected([2] * 5, 6)
        assert core.num_restarts == 2

    def test_it_is_told_logged_and_counted(self, folder, caplog):
        told = []
        core = make_core(folder, lambda recovering: told.append((recovering, core.health().state)))
        core.add_request(request("a", [5]))
        core.step()
        core._executor.die("worker 0 was killed by SIGKILL")
        with caplog.at_level(logging.ERROR):
            drain(core)
        ((recovering, state),) = told
        assert (recovering.cause.type, recovering.num_restarts, state) == ("EngineDeadError", 1, "starting")
        assert recovering.cause.details["signal"] == "SIGKILL"
        assert "restart 1 of 100: worker 0 was killed by SIGKILL" in caplog.text
        health = core.health()
        assert (health.state, health.num_restarts) == ("ready", 1)
        assert health.restart_cause == "worker 0 was killed by SIGKILL"

    def test_ready_is_the_new_workers(self, folder):
        core = make_core(folder, kv_cache_bytes=100 * PAGE)
        before = core.ready
        core._executor.kv_cache_bytes = 50 * PAGE
        core._executor.die()
        core.check_workers()
        assert core.ready is not before
        assert (before.num_blocks, core.ready.num_blocks) == (99, 49)
        assert core.ready.pids["worker 0"] == 1002
        assert list(core.ready.phase_seconds) == list(before.phase_seconds)
        assert core._executor.calls == [
            *("start", "health", "get_kv_cache_spec", "determine_available_memory", "initialize_from_config"),
            *("restart", "get_kv_cache_spec", "determine_available_memory", "initialize_from_config"),
        ]

    def test_over_the_uniproc_executor(self, folder):
        config = make_config(folder, executor=FakeUniproc)
        with EngineCore(config) as core:
            core.add_request(request("bad", [290]))  # RAISES
            core.add_request(request("good", [7]))
            outputs = drain(core)
            assert isinstance(error_of(outputs, "bad"), WorkerDiedError)
            assert tokens(outputs, "good") == expected([7], 6)
            assert core.num_restarts == 2


def test_over_real_processes(folder):
    """A request that kills its worker's process, one killed from outside, and one under a call."""
    config = make_config(folder, executor=FakeMultiproc)
    with EngineCore(config) as core:
        prompts = {f"r{i}": [i + 1] * (i + 3) for i in range(3)}
        for request_id, prompt in prompts.items():
            core.add_request(request(request_id, prompt))
        core.add_request(request("bad", [9, KILLS]))
        outputs = drain(core)
        for request_id, prompt in prompts.items():
            assert tokens(outputs, request_id) == expected(prompt, 6)
        assert error_of(outputs, "bad").details["signal"] == "SIGKILL"
        assert core.num_restarts == 2
        future = core.submit_rpc("nap", (60.0,))
        os.kill(core.ready.pids["worker 0"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            future.result(timeout=30)
        core.add_request(request("after", [5]))
        assert tokens(drain(core), "after") == expected([5], 6)
        assert core.num_restarts == 3
        assert [rank.pid for rank in core.health().ranks] == [core.ready.pids["worker 0"]]


class TestRefusal:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("holds", [False, True])
    @pytest.mark.parametrize("num_tokens", [1, 4, 7])
    def test_after_two_deaths_and_the_neighbours_complete(self, folder, depth, holds, num_tokens):
        core = make_core(folder, holds=holds, steps_in_flight=depth)
        poison = [9, KILLER + num_tokens, 9]
        core.add_request(request("a", [1] * 3))
        core.add_request(request("poison", poison))
        core.add_request(request("c", [2] * 5))
        outputs = drain(core)
        assert core.num_restarts == 2
        (last,) = [o for o in outputs if o.request_id == "poison" and o.finish_reason]
        assert (last.finish_reason, last.error.type) == ("error", "WorkerDiedError")
        assert last.error.details["request_id"] == "poison"
        given_out = tokens(outputs, "poison")
        assert given_out == expected(poison, 6)[: len(given_out)]
        assert tokens(outputs, "a") == expected([1] * 3, 6)
        assert tokens(outputs, "c") == expected([2] * 5, 6)
        assert core._executor.workers[1].steps[-1] == {9}, "the second time alone"

    def test_it_comes_out_of_the_next_step_wherever_it_was_met(self, folder):
        core = make_core(folder, holds=True, steps_in_flight=1)
        core.add_request(request("a", [1] * 3))
        for _ in range(2):
            core.step(block=False)
            core._executor.die()
            core.check_workers()
        assert not core._scheduler.has_unfinished
        assert core.has_unfinished
        assert core.abort(["a"]) == []
        (output,) = core.step(block=False).outputs
        assert (output.request_id, output.finish_reason) == ("a", "error")
        assert not core.has_unfinished
        assert core.advance() is None

    def test_lost_steps_count_as_taken(self, folder):
        """Who waits for the steps before a call must not wait for these."""
        core = make_core(folder, holds=True, steps_in_flight=2)
        core.add_request(request("a", [1] * 3))
        core.step(block=False)
        assert (core.num_steps_completed, core.num_steps_launched) == (0, 2)
        core._executor.die()
        core.check_workers()
        assert (core.num_steps_completed, core.num_steps_launched) == (2, 2)

    def test_a_recovery_is_something_that_happened(self, folder):
        """An event loop must not go to sleep after it."""
        core = make_core(folder)
        core.add_request(request("a", [1] * 3))
        core._executor.die()
        assert core.advance().others == []

    def test_a_step_that_was_never_sent_accuses_nobody(self, folder):
        core = make_core(folder)
        for _ in range(3):
            core.add_request(request("a", [1] * 3))
            core._executor.die()
            core.step()
            core._executor.die()
            core.step()
            assert tokens(drain(core), "a") == expected([1] * 3, 6)


class TestNoRestartLeft:
    def test_as_without_restarts(self, folder):
        core = make_core(folder, max_worker_restarts=0)
        core.add_request(request("a", [1]))
        future = core.submit_rpc("stats")
        core._executor.die("worker 0 was killed by SIGKILL", noticed=False)
        with pytest.raises(EngineDeadError) as caught:
            drain(core)
        assert caught.value.message == "worker 0 was killed by SIGKILL"
        assert type(caught.value) is EngineDeadError
        assert future.result()[0]["rank"] == 0, "it was answered before"
        assert core.num_restarts == 0

    def test_when_they_are_used_up(self, folder):
        core = make_core(folder, max_worker_restarts=2)
        core.add_request(request("a", [1], max_tokens=20))
        for _ in range(2):
            core.step()
            core._executor.die()
            core.step()
        core._executor.die("the third time")
        with pytest.raises(EngineDeadError, match="the third time; the workers were restarted 2 times") as caught:
            core.step()
        assert caught.value.details["signal"] == "SIGKILL"
        for call in (core.step, core.check_workers, core.wait_fds, lambda: core.submit_rpc("stats")):
            with pytest.raises(EngineDeadError, match="the third time"):
                call()
        health = core.health()
        assert (health.state, health.num_restarts, health.ranks) == ("dead", 2, [])
        assert "the third time" in health.error

    def test_a_start_that_fails_is_tried_again(self, folder):
        core = make_core(folder, max_worker_restarts=3)
        core.add_request(request("a", [1]))
        core.step()
        core._executor.die()
        core._executor.start_errors += [ModelLoadError("the disk is gone"), EngineDeadError("killed at start")]
        assert tokens(drain(core), "a") == expected([1], 6)[1:]
        assert core.num_restarts == 3
        assert "killed at start" in core.health().restart_cause

    def test_a_start_that_fails_for_good_names_both_causes(self, folder):
        core = make_core(folder, max_worker_restarts=2)
        core.add_request(request("a", [1]))
        core.step()
        core._executor.die("killed by SIGKILL")
        core._executor.start_errors += [ModelLoadError("first"), ModelLoadError("the disk is gone", path="/x")]
        with pytest.raises(EngineDeadError, match=r"the disk is gone.*killed by SIGKILL") as caught:
            core.step()
        assert isinstance(caught.value.__cause__, ModelLoadError)
        assert caught.value.details["path"] == "/x"
        assert "first" not in caught.value.message, "the loss and the last failure, not the ones between"
        with pytest.raises(EngineDeadError, match="the disk is gone"):
            core.add_request(request("b", [1]))

    def test_too_little_memory_for_the_new_workers(self, folder):
        core = make_core(folder, max_worker_restarts=1)
        core._executor.kv_cache_bytes = 5 * PAGE
        core._executor.die()
        with pytest.raises(EngineDeadError, match="KV cache: one request of 64 tokens") as caught:
            core.check_workers()
        assert isinstance(caught.value.__cause__, CapacityError)

    def test_the_schedulers_own_error_ends_the_engine(self, folder):
        """What it left behind is unknown: there is nothing to go on from."""
        core = make_core(folder)
        core.add_request(request("a", [1]))
        core._scheduler.update = lambda *_: 1 // 0
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            core.step()
        assert core.num_restarts == 0
        assert core.health().state == "dead"

    def test_shutdown_is_the_end_also_between_loss_and_restart(self, folder):
        core = make_core(folder)
        future = core.submit_rpc("stats")
        future._future.is_held = True
        core._executor.die()
        with pytest.raises(WorkerDiedError):
            future.result()
        core.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            core.step()
        assert core.num_restarts == 0

    def test_shutdown_by_a_signal_handler_during_the_restart(self, folder):
        core = make_core(folder, lambda _: core.shutdown())
        core.add_request(request("a", [1]))
        core._executor.die()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            core.step()
        assert core.num_restarts == 1


class TestCalls:
    def lost_future(self, core):
        future = core.submit_rpc("echo", ("x",))
        future._future.is_held = True
        core._executor.die()
        return future

    def test_a_future_says_that_a_restart_comes_and_the_next_call_makes_it(self, folder):
        core = make_core(folder)
        future = self.lost_future(core)
        assert future.done()
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL") as caught:
            future.result()
        assert caught.value.details["rank"] == 0
        with pytest.raises(WorkerDiedError):
            future.encoded_result()
        assert (core.num_restarts, core.health().state) == (0, "starting")
        assert core.collective_rpc("echo", ("y",)) == ["0:y"]
        assert (core.num_restarts, core.health().state) == (1, "ready")

    def test_an_old_future_says_nothing_of_new_workers(self, folder):
        core = make_core(folder)
        future = self.lost_future(core)
        core.check_workers()
        assert core.num_restarts == 1
        with pytest.raises(WorkerDiedError):
            future.result()
        core.check_workers()
        assert core.num_restarts == 1

    def test_with_no_restart_left_a_future_says_that_it_is_the_end(self, folder):
        core = make_core(folder, max_worker_restarts=0)
        future = self.lost_future(core)
        with pytest.raises(EngineDeadError) as caught:
            future.result()
        assert type(caught.value) is EngineDeadError
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            core.step()

    def test_after_the_end_a_future_says_that_it_is_the_end(self, folder):
        core = make_core(folder)
        future = self.lost_future(core)
        core.shutdown()
        with pytest.raises(EngineDeadError) as caught:
            future.result()
        assert type(caught.value) is EngineDeadError

    def test_a_death_found_at_the_call_costs_the_call_nothing(self, folder):
        core = make_core(folder)
        core._executor.die()
        assert core.collective_rpc("echo", ("y",), {"times": 2}) == ["0:yy"]
        assert core.num_restarts == 1

    def test_forwarded_unread(self, folder):
        core = make_core(folder)
        future = core.forward_rpc(WorkerCall("echo", ("x",)).encoded())
        assert future.result() == ["0:x"]
        assert [len(parts) for parts in future.encoded_result()] == [1]
        core._executor.die()
        assert core.forward_rpc(WorkerCall("echo", ("x",)).encoded()).result() == ["0:x"]

    def test_an_error_of_a_call_is_that_calls_alone(self, folder):
        core = make_core(folder)
        with pytest.raises(KeyError):
            core.collective_rpc("fail")
        with pytest.raises(InvalidRequestError):
            core.collective_rpc("no_such_method")
        assert core.num_restarts == 0

    def test_descriptors_are_those_of_the_new_workers(self, folder):
        core = make_core(folder)
        assert core.wait_fds() == [1]
        core._executor.die()
        assert core.wait_fds() == [2]
        assert core.num_restarts == 1

    def test_requests_come_and_go_while_the_workers_are_lost(self, folder):
        core = make_core(folder, holds=True)
        core.add_request(request("a", [1]))
        core.add_request(request("b", [2]))
        core.step(block=False)
        with pytest.raises(WorkerDiedError):
            self.lost_future(core).result()
        assert [o.request_id for o in core.abort(["a"])] == ["a"]
        core.add_request(request("c", [3]))
        assert core.num_restarts == 0
        outputs = drain(core)
        assert tokens(outputs, "b") == expected([2], 6)
        assert tokens(outputs, "c") == expected([3], 6)
        assert tokens(outputs, "a") == []


class TestHealth:
    def test_of_a_fresh_engine(self, folder):
        health = make_core(folder).health()
        assert (health.state, health.step, health.num_restarts) == ("ready", 0, 0)
        assert health.last_step_age_s is health.oldest_step_s is health.oldest_waiting_s is None
        assert health.restart_cause is health.error is None
        assert [rank.pid for rank in health.ranks] == [1001]

    def test_counts_and_ages(self, folder):
        core = make_core(folder, holds=True, max_num_seqs=1)
        core.add_request(request("a", [1]))
        core.add_request(request("b", [2]))
        core.step()
        core._executor.step_age_s = 2.5
        health = core.health()
        assert (health.state, health.num_running, health.num_waiting) == ("ready", 1, 1)
        assert health.step == 2
        assert health.oldest_step_s == 2.5
        assert 0 <= health.last_step_age_s < 60
        assert health.oldest_waiting_s > 0  # since it arrived, at 0 on the host's clock

    def test_a_step_that_takes_too_long_is_a_stall(self, folder):
        core = make_core(folder, stall_warning_s=3.0)
        core._executor.step_age_s = 3.1
        assert core.health().state == "stalled"
        core._executor.step_age_s = 2.9
        assert core.health().state == "ready"

    def test_of_a_dead_engine(self, folder):
        core = make_core(folder)
        core.shutdown()
        health = core.health()
        assert (health.state, health.error) == ("dead", "the engine was shut down")


PLANS = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([1, 2]),
        "holds": st.booleans(),
        "num_blocks": st.sampled_from([18, 25, 60]),
        "max_num_seqs": st.sampled_from([8, 2, 1]),
        "budget": st.sampled_from([64, 9]),
        "caching": st.booleans(),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(1, 24), st.sampled_from([*[None] * 6, KILLER, CRASHER]), st.integers(0, 9)
        ),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("die"), st.booleans()),
        st.tuples(st.just("call"), st.booleans()),
    ),
    max_size=25,
)


class Run:
    """An engine under a schedule of operations, and what its requests must come to."""

    def __init__(self, folder, depth, holds, num_blocks, max_num_seqs, budget, caching) -> None:
        self.core = make_core(
            folder,
            holds=holds,
            max_worker_restarts=10_000,
            steps_in_flight=depth,
            num_blocks_override=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
        )
        self.prompts: dict[str, list[int]] = {}
        self.poisonous: set[str] = set()
        self.outputs: dict[str, list] = {}
        self.num_deaths = 0

    def add(self, length, poison, at) -> None:
        number = len(self.prompts)
        request_id, prompt = f"r{number}", [number + 1] + [7] * length
        if poison is not None:
            prompt[-1] = poison + min(length + at, 49)
            self.poisonous.add(request_id)
        self.core.add_request(request(request_id, prompt, max_tokens=10))
        self.prompts[request_id], self.outputs[request_id] = prompt, []

    def abort(self, number) -> None:
        self._take(self.core.abort([f"r{number}"]))

    def step(self, count) -> None:
        for _ in range(count):
            self._take(self.core.step().outputs)

    def die(self, noticed) -> None:
        if self.core._executor.dead is None:
            self.num_deaths += 1
            self.core._executor.die(noticed=noticed)

    def call(self, checks) -> None:
        if checks:
            self.core.check_workers()
            return
        try:
            assert self.core.collective_rpc("echo", ("x",)) == ["0:x"]
        except WorkerDiedError:
            assert self.core.health().state == "starting"

    def finish(self) -> None:
        for _ in range(5000):
            if not self.core.has_unfinished:
                break
            self.step(1)
        assert not self.core.has_unfinished
        refused = set()
        for request_id, prompt in self.prompts.items():
            *_, last = self.outputs[request_id]
            whole, found = expected(prompt, 10), self.tokens(request_id)
            assert found == whole[: len(found)], "tokens are lost, or come twice"
            assert last.finish_reason in ("length", "abort", "error")
            assert (last.finish_reason == "length") == (len(found) == 10)
            if last.finish_reason == "error":
                assert last.error.type == "WorkerDiedError"
                refused.add(request_id)
            assert request_id not in self.poisonous or last.finish_reason in ("error", "abort"), "it was let through"
        if not self.num_deaths:
            assert refused <= self.poisonous, "a neighbour is refused"
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == self.core.ready.num_blocks
        self._check_deaths(refused)

    def _check_deaths(self, refused) -> None:
        """A refused request was in the last steps of two generations of workers, at the second alone."""
        workers = self.core._executor.workers
        seeds: dict[int, set[int]] = {}
        for worker in workers:
            for first, found in worker.seeds.items():
                seeds.setdefault(first, set()).update(found)
        assert all(len(found) == 1 for found in seeds.values()), "a seed changed"
        num_aborted = sum(outputs[-1].finish_reason == "abort" for outputs in self.outputs.values())
        assert self.core.num_restarts <= 2 * (len(refused) + num_aborted) + self.num_deaths
        if not self.num_deaths and not num_aborted and len(refused) == 1:
            assert self.core.num_restarts == 2
            (first,) = [self.prompts[request_id][0] for request_id in refused]
            assert workers[1].steps[-1] == {first}

    def tokens(self, request_id) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def _take(self, outputs) -> None:
        for output in outputs:
            assert not any(o.finish_reason for o in self.outputs[output.request_id]), "an output after the last one"
            self.outputs[output.request_id].append(output)


@settings(
    max_examples=num_examples(100, 300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=PLANS, operations=OPERATIONS)
def test_any_schedule(folder, plan, operations):
    run = Run(folder, **plan)
    for name, *arguments in operations:
        getattr(run, name)(*arguments)
        run.core._scheduler.check()
    run.finish()
