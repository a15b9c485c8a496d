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


class Counting:
    """An observer of steps."""

    num_steps = 0

    def completed(self, record, columns) -> None:
        self.num_steps += 1

    def sent(self, began_s, ended_s) -> None:
        """Not counted."""


def num_records(tracer) -> int:
    return len(tracer._records) + len(tracer._notes)


def test_steps_after_the_deadline_are_not_recorded(tmp_path) -> None:
    core = make_core(make_model_folder(tmp_path))
    core.start_trace(60.0)
    other = Counting()  # it is told after the trace, whose end it must not miss
    core._steps.observers.append(other)
    run(core, "traced")
    tracer, num_traced = core.tracing.tracer, other.num_steps
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
    assert other.num_steps == 3 * num_traced > 0
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
