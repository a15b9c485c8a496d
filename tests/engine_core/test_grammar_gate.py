"""Requests with structured outputs in EngineCore: held until their grammar is known, and never in anybody's way."""

from __future__ import annotations

import os
from collections import deque

import pytest
from fake_engine import expected, make_model_folder
from mortal_executor import MortalExecutor, WorkerKilled

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.engine_core import grammar_gate
from ringcore.engine_core.grammar_compiler import CompileResult
from ringcore.errors import CapacityError, EngineDeadError, InvalidRequestError, RingcoreError, SleepingError
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.operations import Sleep
from ringcore.protocol.requests import EngineCoreRequest


class FakeCompiler:
    """Returns its result when the test says so. It fails as the real one would where it is used otherwise."""

    def __init__(self) -> None:
        self.specs: list[StructuredOutputsParams] = []  # all it was given, in order
        self.num_cancelled = self.num_closed = 0
        self.start_errors: deque[RingcoreError] = deque()
        self._result: CompileResult | None = None
        self.is_busy = self.has_unreaped = False
        self._fd = os.eventfd(0)

    @property
    def fds(self) -> list[int]:
        return [self._fd] if self.is_busy else []

    def compile(self, spec) -> None:
        assert not self.is_busy
        if self.start_errors:
            raise self.start_errors.popleft()
        self.specs.append(spec)
        self.is_busy = True

    def decide(self, error: RingcoreError | None = None) -> None:
        assert self.is_busy
        self._result = CompileResult(error)
        os.eventfd_write(self._fd, 1)

    def poll(self) -> CompileResult | None:
        result, self._result = self._result, None
        if result is not None:
            self.is_busy = False
            os.eventfd_read(self._fd)
        return result

    def cancel(self) -> None:
        assert self.is_busy
        self.is_busy = False
        self.num_cancelled += 1

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(folder):
    """An engine over a worker in this process, and the compiler that it waits for."""
    fds = []

    def make_core(*, holds=False, **options):
        config = EngineConfig.from_options(
            model=folder,
            load_format="dummy",
            **({"max_model_len": 64, "block_size": 4, "steps_in_flight": 2} | options),
        )
        core = EngineCore(config, MortalExecutor(config, holds=holds))
        compiler = core._grammars._compiler = FakeCompiler()
        fds.append(compiler._fd)
        return core, compiler

    yield make_core
    for fd in fds:
        os.close(fd)


def request(request_id, letter=None, prompt=(5, 6), arrival_s=0.0, **params):
    """letter: of its grammar, if it has one."""
    outputs = None if letter is None else StructuredOutputsParams(regex=letter)
    params = SamplingParams(max_tokens=4, structured_outputs=outputs, **params)
    return EngineCoreRequest(request_id, list(prompt), params, arrival_s=arrival_s)


def letters(specs):
    return [spec.regex for spec in specs]


def step(core):
    outputs = core.step(block=False).outputs
    core._grammars.check()
    core._scheduler.check()
    return outputs


def drain(core):
    outputs = []
    for _ in range(500):
        if not core.has_unfinished:
            return outputs
        outputs += step(core)
    raise AssertionError("no end")


def tokens(outputs, request_id):
    return [t for output in outputs if output.request_id == request_id for t in output.new_token_ids]


def errors(outputs):
    return {output.request_id: output.error.message for output in outputs if output.error is not None}


def test_a_new_grammar_is_compiled_before_its_request_is_queued(make):
    core, compiler = make()
    core.add_request(request("a", "x"))
    for _ in range(3):
        assert step(core) == []
    assert core.has_unfinished
    assert core.is_operating
    assert core.stats().num_waiting == 1
    assert letters(compiler.specs) == ["x"]
    assert core._executor.worker.grammars == []
    compiler.decide()
    outputs = drain(core)
    assert letters(core._executor.worker.grammars) == ["x"]
    assert tokens(outputs, "a") == expected([5, 6], 4)
    assert not core.is_operating
    assert core.stats().num_waiting == 0


def test_others_go_on_meanwhile_and_a_known_grammar_passes_at_once(make):
    core, compiler = make()
    core.add_request(request("first", "x"))
    step(core)
    compiler.decide()
    drain(core)
    core.add_request(request("slow", "y"))
    core.add_request(request("plain", prompt=(7, 8)))
    core.add_request(request("known", "x", prompt=(9,)))
    outputs = []
    while not (tokens(outputs, "plain")[3:] and tokens(outputs, "known")[3:]):
        outputs += step(core)
    assert tokens(outputs, "plain") == expected([7, 8], 4)
    assert tokens(outputs, "known") == expected([9], 4)
    assert letters(compiler.specs) == ["x", "y"]
    assert core.has_unfinished
    compiler.decide()
    assert tokens(drain(core), "slow") == expected([5, 6], 4)


def test_a_grammar_is_compiled_once_for_all_who_wait_for_it(make):
    core, compiler = make()
    for number in range(5):
        core.add_request(request(f"r{number}", "xy"[number % 2], prompt=(5, number)))
    outputs = step(core)
    compiler.decide()
    outputs += step(core)
    compiler.decide()
    outputs += drain(core)
    assert letters(compiler.specs) == ["x", "y"]
    assert letters(core._executor.worker.grammars) == ["x", "y"]
    assert all(tokens(outputs, f"r{number}") == expected([5, number], 4) for number in range(5))


def test_each_takes_the_place_of_its_arrival(make):
    core, compiler = make(max_num_seqs=1)
    core.add_request(request("held", "x", prompt=(5,)))
    core.add_request(request("running", prompt=(6,)))
    step(core)
    core.add_request(request("later", prompt=(7,)))
    compiler.decide()
    ended = [output.request_id for output in drain(core) if output.finish_reason]
    assert ended == ["running", "held", "later"]


def test_a_grammar_that_is_refused_is_the_error_of_its_requests_alone(make):
    core, compiler = make()
    for request_id, letter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        core.add_request(request(request_id, letter))
    outputs = step(core)
    compiler.decide(InvalidRequestError("it is wrong", field="structured_outputs.regex", value=None))
    outputs += step(core)
    compiler.decide()
    outputs += drain(core)
    assert errors(outputs) == {"a": "it is wrong", "c": "it is wrong"}
    assert {o.error.type for o in outputs if o.error} == {"InvalidRequestError"}
    assert len(tokens(outputs, "b")) == len(tokens(outputs, "d")) == 4
    core.add_request(request("a", "x"))  # its id is free, and the grammar is tried anew
    step(core)
    assert letters(compiler.specs) == ["x", "y", "x"]


def test_a_compiler_that_cannot_be_started_is_the_error_of_the_request(make):
    core, compiler = make()
    compiler.start_errors.append(CapacityError("too many open files"))
    core.add_request(request("a", "x"))
    core.add_request(request("b", "y"))
    assert errors(step(core)) == {"a": "too many open files"}
    assert letters(compiler.specs) == ["y"]


def test_a_grammar_that_a_worker_refuses(make):
    core, compiler = make()
    core._executor.worker.failing["compile_grammar"] = InvalidRequestError("no room", field="x", value=None)
    core.add_request(request("a", "x"))
    step(core)
    compiler.decide()
    assert errors(drain(core)) == {"a": "no room"}


def test_requests_that_are_wrong_are_refused_at_once(make):
    core, compiler = make()
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        core.add_request(request("a", "x", prompt=(10**6,)))
    assert not core.has_unfinished
    core.add_request(request("a", "x"))
    for again in (request("a", "y"), request("a")):
        with pytest.raises(InvalidRequestError, match="not finished yet"):
            core.add_request(again)
    compiler.decide() if compiler.is_busy else step(core)
    compiler.decide()
    drain(core)
    core.add_request(request("a"))
    with pytest.raises(InvalidRequestError, match="not finished yet"):
        core.add_request(request("a", "z"))


def test_an_abort_ends_one_that_waits(make):
    core, compiler = make()
    for request_id, letter in (("a", "x"), ("b", "x"), ("c", "y")):
        core.add_request(request(request_id, letter))
    step(core)
    (output,) = core.abort(["a", "nobody"])
    assert (output.request_id, output.finish_reason, output.new_token_ids) == ("a", "abort", [])
    assert compiler.num_cancelled == 0  # the other one still wants it
    assert [o.request_id for o in core.abort(["c", "b", "b"])] == ["c", "b"]
    assert compiler.num_cancelled == 1
    core._grammars.check()
    assert not core.has_unfinished
    assert core.stats().num_waiting == 0
    core.add_request(request("a", "x"))
    step(core)
    compiler.decide()
    assert tokens(drain(core), "a") == expected([5, 6], 4)


def test_known_grammars_are_bounded(make, monkeypatch):
    monkeypatch.setattr(grammar_gate, "MAX_CACHED", 3)
    core, compiler = make()
    for number in range(4):
        core.add_request(request("a", f"x{number}"))
        step(core)
        compiler.decide()
        drain(core)
    assert len(core._grammars._known) == 3
    core.add_request(request("a", "x3"))
    assert not core._grammars
    drain(core)
    core.add_request(request("a", "x0"))
    assert core._grammars


def test_an_engine_that_sleeps_refuses_them(make):
    core, _ = make(enable_sleep_mode=True)
    core.sleep()
    with pytest.raises(SleepingError):
        core.add_request(request("a", "x"))


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_sleep_while_one_waits(make, mode):
    core, compiler = make(enable_sleep_mode=True)
    core.add_request(request("a", "x"))
    step(core)
    core.sleep(mode=mode)
    outputs = []
    if mode == "keep":
        compiler.decide()
        outputs += step(core)
        assert outputs == []  # it is in the queue of an engine that stands still
    core.wake_up()
    outputs += drain(core)
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort" if mode == "abort" else "length"]
    assert compiler.num_cancelled == (mode == "abort")


def test_sleep_that_waits_waits_for_them_too(make):
    core, compiler = make(enable_sleep_mode=True)
    core.add_request(request("a", "x"))
    step(core)
    operation = core.submit_operation(Sleep(mode="wait"))
    for _ in range(3):
        step(core)
    assert not operation.done()
    compiler.decide()
    assert tokens(drain(core), "a") == expected([5, 6], 4)
    assert operation.done()


def test_a_step_that_waits_wakes_up_for_the_compiler(make):
    core, compiler = make()
    core.add_request(request("a", "x"))
    core.step(block=True)
    compiler.decide()
    assert compiler.fds[0] in core.wait_fds()
    outputs = []
    while core.has_unfinished:
        outputs += core.step(block=True).outputs
    assert tokens(outputs, "a") == expected([5, 6], 4)
    assert compiler._fd not in core.wait_fds()


def test_new_workers_are_told_every_grammar_anew(make):
    core, compiler = make(max_worker_restarts=1)
    core.add_request(request("a", "x"))
    step(core)
    compiler.decide()
    drain(core)
    core._executor.die()
    core.add_request(request("b", prompt=(7,)))
    drain(core)
    assert core.num_restarts == 1
    core.add_request(request("c", "x"))
    step(core)
    compiler.decide()
    drain(core)
    assert letters(core._executor.worker.grammars) == ["x"]


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_death_under_a_grammar_is_another_try_and_a_second_one_an_error(make, num_deaths):
    core, compiler = make(max_worker_restarts=3)
    core.add_request(request("a", "x"))
    step(core)
    compiler.decide()
    outputs = []
    for number in range(num_deaths):
        core._executor.worker.failing["compile_grammar"] = WorkerKilled()
        while core.num_restarts == number:
            outputs += step(core)
    core.add_request(request("b", prompt=(7,)))
    outputs += drain(core)
    if num_deaths == 1:
        assert tokens(outputs, "a") == expected([5, 6], 4)
        assert letters(core._executor.worker.grammars) == ["x"]
    else:
        assert "workers died 2 times" in errors(outputs)["a"]
    assert tokens(outputs, "b") == expected([7], 4)


def test_a_death_without_a_restart_is_the_engines(make):
    core, compiler = make()
    core._executor.worker.failing["compile_grammar"] = WorkerKilled()
    core.add_request(request("a", "x"))
    step(core)
    compiler.decide()
    with pytest.raises(EngineDeadError):
        drain(core)


def test_shutdown_ends_the_compiler(make):
    core, compiler = make()
    core.add_request(request("a", "x"))
    step(core)
    core.shutdown()
    assert compiler.num_closed == 1


def test_operators_see_who_waits_for_a_grammar(make):
    core, compiler = make()
    core.add_request(request("plain", arrival_s=2.0))
    core.add_request(request("held", "a", arrival_s=1.0))
    step(core)
    found = core.engine_call("requests")()
    assert found.num_by_state == {"running": 1, "waiting": 0, "preempted": 0, "held": 0, "compiling": 1, "loading": 0}
    assert [(one.request_id, one.state, one.num_prompt_tokens) for one in found.oldest] == [
        ("held", "compiling", 2),
        ("plain", "running", 2),
    ]
    assert [one.request_id for one in core.engine_call("requests")(1).oldest] == ["held"]
    assert core.engine_call("abort")("held") == ["held"]
    assert compiler.num_cancelled == 1
    assert [output.finish_reason for output in drain(core) if output.request_id == "held"] == ["abort"]
