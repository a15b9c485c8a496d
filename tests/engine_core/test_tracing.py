"""A trace of the engine that no one stops ends by its deadline, and later steps and an idle loop record nothing."""

from __future__ import annotations

from fake_engine import make_model_folder
from mortal_executor import MortalExecutor
from served_loop import ScriptedCore, Served, wait_until

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.tracing import now_ns


def make_core(folder) -> EngineCore:
    config = EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=64, block_size=4)
    return EngineCore(config, MortalExecutor(config))


def run(core, name) -> None:
    core.add_request(EngineCoreRequest(name, [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True), arrival_s=0.0))
    while core.has_unfinished:
        core.step()


def num_records(tracer) -> int:
    return len(tracer._records) + len(tracer._notes)


def test_steps_after_the_deadline_are_not_recorded(tmp_path) -> None:
    core = make_core(make_model_folder(tmp_path))
    core.step_metrics()
    core.start_trace(60.0)
    core._steps.observers.append(core._steps.observers.pop(1))  # metrics after the trace, whose end they must not miss
    run(core, "traced")
    tracer, metered = core.tracing.tracer, core._step_log._steps
    num_metered = len(metered)
    before = num_records(tracer)
    assert before > 10
    tracer._deadline_ns = now_ns()
    core.tracing._deadline_s = tracer._deadline_ns / 1e9
    run(core, "later")
    assert not tracer.is_on
    assert core.tracing not in core._steps.observers
    at_end = num_records(tracer)
    assert at_end - before < 5  # of the step that found the deadline
    run(core, "much later")
    core.note_send(1.0, 2.0)
    assert num_records(tracer) == at_end
    assert len(metered) == 3 * num_metered
    core.start_trace(60.0)  # another one can begin
    run(core, "again")
    assert num_records(tracer) > 10
    core.stop_trace()
    core.shutdown()


def test_an_idle_loop_ends_a_trace_at_its_deadline() -> None:
    """It completes no step, and is woken now and then."""
    core = ScriptedCore()
    tracer = core.tracing.tracer
    with Served(core):
        in_loop(core, lambda: core.tracing.start(60.0, []))
        in_loop(core)
        assert tracer.is_on
        in_loop(core, lambda: setattr(tracer, "_deadline_ns", now_ns()))
        in_loop(core)
        wait_until(lambda: not tracer.is_on)
        at_end = num_records(tracer)
        assert at_end
        for _ in range(3):
            in_loop(core)
        assert num_records(tracer) == at_end


def in_loop(core, action=lambda: None) -> None:
    """Wakes the idle loop, which calls `action`."""
    before = core.num_iterations
    core.do(action)
    wait_until(lambda: core.num_iterations > before and not core.script)
