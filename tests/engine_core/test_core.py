"""EngineCore in this process, over executors that finish a step when the test says so."""

from __future__ import annotations

import pytest
from fake_engine import EOS, RAISES, ROW_FAILS, FakeUniproc, expected, make_model_folder, next_token
from mortal_executor import MortalExecutor

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import CapacityError, EngineDeadError, InvalidRequestError, WorkerError
from ringcore.protocol.requests import EngineCoreRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_config(folder, **options):
    return EngineConfig.from_options(
        model=folder, load_format="dummy", **({"max_model_len": 64, "block_size": 4, "steps_in_flight": 2} | options)
    )


def make_core(folder, **options):
    config = make_config(folder, **options)
    return EngineCore(config, MortalExecutor(config, holds=True))


def request(request_id, prompt, **params):
    return EngineCoreRequest(request_id, prompt, SamplingParams(**({"max_tokens": 4} | params)), arrival_s=0.0)


def drain(core, max_steps=500):
    outputs = []
    while core.has_unfinished:
        outputs += core.step().outputs
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    return outputs


def tokens(outputs, request_id):
    return [t for output in outputs if output.request_id == request_id for t in output.new_token_ids]


def test_start_up_is_in_order_and_described(folder):
    core = make_core(folder, kv_cache_bytes=40 * 256)  # a page of 4 tokens, 1 head of 4 floats, K and V: 128; 2 layers
    assert core._executor.calls == [
        "start",
        "health",
        "get_kv_cache_spec",
        "determine_available_memory",
        "initialize_from_config",
    ]
    ready = core.ready
    assert (ready.num_blocks, ready.block_size, ready.token_capacity) == (39, 4, 156)
    assert ready.max_model_len == 64
    assert ready.max_concurrency == 39 / 16
    assert list(ready.phase_seconds) == [
        "start_workers",
        "load_model",
        "get_kv_cache_spec",
        "determine_available_memory",
        "plan_kv_cache",
        "initialize_from_config",
    ]
    assert ready.memory_bytes[0]["kv_cache"] == 40 * 256
    assert "engine" in ready.pids


def test_too_little_memory_ends_the_workers_and_says_what_fits(folder):
    config = make_config(folder, kv_cache_bytes=5 * 256)
    executor = MortalExecutor(config, holds=True)
    with pytest.raises(CapacityError) as caught:
        EngineCore(config, executor)
    assert caught.value.details["max_model_len"] == 16
    assert executor.num_shutdowns == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_the_models(folder, depth):
    core = make_core(folder, steps_in_flight=depth, max_num_batched_tokens=16)
    prompts = {f"r{i}": [i + 1] * length for i, length in enumerate([1, 3, 4, 17, 40])}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, max_tokens=9))
    outputs = drain(core)
    for request_id, prompt in prompts.items():
        assert tokens(outputs, request_id) == expected(prompt, 9)
    assert core.stats().num_running == core.stats().num_waiting == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_in_flight_as_configured(folder, depth):
    core = make_core(folder, steps_in_flight=depth)
    core.add_request(request("a", [5, 6], max_tokens=8))
    assert core.step(block=False).outputs == []
    assert core.num_in_flight == depth
    assert core.step(block=False).outputs == []  # nothing is finished: no output is applied, no step launched
    assert core.num_in_flight == len(core._executor.steps) == depth
    core._executor.steps[0].finish()
    assert tokens(core.step(block=False).outputs, "a") == [next_token([5, 6])]
    assert core.num_in_flight == depth - 1


def test_on_a_cpu_a_step_is_launched_ahead_of_short_decodes_alone(folder):
    config = make_config(folder, steps_in_flight=None, device="cpu", max_num_batched_tokens=4)
    short_s = config.scheduler.short_step_s
    now = [0.0]
    core = EngineCore(config, MortalExecutor(config, holds=True), clock=lambda: now[0])

    def in_flight_after(seconds):
        """How many steps are in flight once the oldest has taken so long."""
        now[0] += seconds
        next(step for step in core._executor.steps if not step.done()).finish()
        core.step(block=False)
        core.step(block=False)
        return core.num_in_flight

    core.add_request(request("a", [5] * 7, max_tokens=30))
    core.step(block=False)
    assert in_flight_after(short_s / 2) == 1  # the second chunk of the prompt
    assert in_flight_after(short_s / 2) == 1  # a decode of unknown length
    assert in_flight_after(short_s / 2) == 2
    core.add_request(request("b", [6] * 6, max_tokens=30))
    assert in_flight_after(short_s / 2) == 2  # a chunk behind a short decode
    assert in_flight_after(short_s / 2) == 1  # none behind a chunk
    assert in_flight_after(short_s * 2) == 1
    assert in_flight_after(short_s * 2) == 2  # chunks may be long
    assert in_flight_after(short_s * 2) == 1  # a long decode
    assert in_flight_after(short_s / 2) == 2


def test_an_event_loop_can_tell_no_result_from_an_empty_one(folder):
    core = make_core(folder, steps_in_flight=1, max_num_batched_tokens=4)
    core.add_request(request("a", [5] * 8))
    assert core.advance() is None
    core._executor.steps[0].finish()
    columns = core.advance()  # the first chunk of a prompt samples nothing
    assert [started.request_id for started in columns.started] == ["a"]
    assert not len(columns.rows)
    assert columns.others == []


def test_an_empty_step_returns_at_once(folder):
    core = make_core(folder)
    outputs = core.step()
    assert outputs.outputs == []
    assert outputs.stats.num_running == 0
    assert not core.has_unfinished


def test_a_wrong_request_changes_nothing(folder):
    core = make_core(folder)
    core.add_request(request("a", [5]))
    for wrong in (request("a", [5]), request("b", []), request("b", [999]), request("b", [5] * 64)):
        with pytest.raises(InvalidRequestError):
            core.add_request(wrong)
    outputs = drain(core)
    assert tokens(outputs, "a") == expected([5], 4)
    assert {o.request_id for o in outputs} == {"a"}


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_while_a_step_is_in_flight(folder, depth):
    core = make_core(folder, steps_in_flight=depth)
    core.add_request(request("a", [5], max_tokens=50))
    core.add_request(request("b", [6], max_tokens=6))
    core.step(block=False)
    aborted = core.abort(["a", "unknown", "a"])
    assert [(o.request_id, o.finish_reason) for o in aborted] == [("a", "abort")]
    outputs = drain(core)
    assert tokens(outputs, "a") == []
    assert tokens(outputs, "b") == expected([6], 6)
    assert core.abort(["a", "b"]) == []


def test_preemption_gives_the_same_tokens(folder):
    core = make_core(folder, max_model_len=32, num_blocks_override=10, enable_prefix_caching=False)
    prompts = {f"r{i}": [i + 1] * 6 for i in range(4)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, max_tokens=20))
    outputs = drain(core)
    assert core.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert tokens(outputs, request_id) == expected(prompt, 20)


def test_stop_token_ids_and_end_of_text(folder):
    core = make_core(folder)
    stop = expected([5], 3)[2]
    core.add_request(request("a", [5], max_tokens=20, stop_token_ids=[stop]))
    last = drain(core)[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert EOS not in expected([5], 20)


def test_one_bad_row_fails_alone(folder):
    core = make_core(folder)
    core.add_request(request("bad", [ROW_FAILS]))
    core.add_request(request("good", [7]))
    outputs = drain(core)
    bad = [o for o in outputs if o.request_id == "bad"]
    assert [(o.finish_reason, o.error.type) for o in bad] == [("error", "WorkerError")]
    assert tokens(outputs, "good") == expected([7], 4)


def test_an_error_in_a_step_ends_the_engine(folder):
    core = make_core(folder)
    core.add_request(request("a", [RAISES]))
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: the forward pass failed") as caught:
        drain(core)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for call in (
        core.step,
        lambda: core.add_request(request("b", [5])),
        lambda: core.abort(["a"]),
        lambda: core.collective_rpc("stats"),
        core.reset_prefix_cache,
    ):
        with pytest.raises(EngineDeadError, match="the forward pass failed"):
            call()
    core.shutdown()


def test_collective_rpc_between_steps(folder):
    core = make_core(folder)
    core.add_request(request("a", [5]))
    core.step(block=False)
    assert core.collective_rpc("echo", ("x",), {"times": 2}) == ["0:xx"]
    with pytest.raises(KeyError):
        core.collective_rpc("fail")
    assert tokens(drain(core), "a") == expected([5], 4)  # a call's error is not the engine's


def test_reset_prefix_cache(folder):
    core = make_core(folder, steps_in_flight=1)
    for request_id in ("a", "b"):
        core.add_request(request(request_id, [5] * 12))
        hits = [o.num_cached_tokens for o in drain(core)]
    assert hits[-1] == 11  # all but the last token, which is computed again
    core.add_request(request("c", [5] * 12))
    core.step(block=False)
    assert core.reset_prefix_cache() is False
    drain(core)
    assert core.reset_prefix_cache() is True
    core.add_request(request("d", [5] * 12))
    assert drain(core)[-1].num_cached_tokens == 0


def test_shutdown_is_idempotent_and_final(folder):
    config = make_config(folder)
    executor = MortalExecutor(config, holds=True)
    with EngineCore(config, executor) as core:
        core.add_request(request("a", [5]))
        core.step(block=False)
    core.shutdown()
    assert executor.num_shutdowns >= 1
    with pytest.raises(EngineDeadError, match="shut down"):
        core.step()


def test_over_the_uniproc_executor(folder):
    config = make_config(folder, executor=FakeUniproc)
    with EngineCore(config) as core:
        core.add_request(request("a", [5, 6], logprobs=1))
        outputs = drain(core)
        assert tokens(outputs, "a") == expected([5, 6], 4)
        assert outputs[0].logprobs[0].token_ids[0] == outputs[0].new_token_ids[0]
        with pytest.raises(WorkerError, match="no such thing"):
            core.collective_rpc("fail")
