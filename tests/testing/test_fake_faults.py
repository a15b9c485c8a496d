"""What goes wrong by order, seen through the real engine: recovery gives the tokens of an undisturbed run."""

from __future__ import annotations

import pytest
from fake_engines import add, drain, make_config, make_core

from ringcore.errors import EngineDeadError
from ringcore.testing import Fault, StepCost

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [6, 7], "c": [8, 9, 10]}


def run(folder, faults=(), **options):
    core = make_core(make_config(folder, **options), cost=StepCost(base_s=1.0), faults=faults)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        add(core, name, prompt, max_tokens=6, seed=index)
    return core, drain(core)


@pytest.fixture(scope="module")
def undisturbed(model_folder):
    return run(model_folder)[1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("kind", ["death", "error", "hang"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_lost_workers_are_replaced(model_folder, undisturbed, kind, step, steps_in_flight):
    options = {"max_worker_restarts": 1, "steps_in_flight": steps_in_flight}
    core, got = run(model_folder, [Fault(step=step, kind=kind)], **options)
    assert got == undisturbed
    assert core.num_restarts == 1


def test_who_is_in_two_deaths_is_to_blame(model_folder, undisturbed):
    """After the first the requests run one by one; the second death comes while the first of them does."""
    faults = [Fault(step=1, kind="death"), Fault(step=2, kind="death")]
    core, got = run(model_folder, faults, max_worker_restarts=2)
    assert got["a"][1:] == ("error", "WorkerDiedError")
    assert {name: got[name] for name in "bc"} == {name: undisturbed[name] for name in "bc"}
    assert core.num_restarts == 2


def test_without_restarts_a_death_ends_the_engine(model_folder):
    core = make_core(make_config(model_folder), faults=[Fault(step=1, kind="death")])
    add(core, "a", [1, 2])
    core.step()
    with pytest.raises(EngineDeadError, match="worker 0 was killed by SIGKILL") as caught:
        core.step()
    assert caught.value.details["signal"] == "SIGKILL"
    with pytest.raises(EngineDeadError):
        core.step()


def test_a_death_comes_in_its_time(model_folder):
    """It is seen 3 s into the step, by who waits for the step and by who calls."""
    fault = Fault(step=0, kind="death", seconds=3.0)
    core = make_core(make_config(model_folder, max_worker_restarts=1), cost=StepCost(base_s=1.0), faults=[fault])
    add(core, "a", [1, 2], max_tokens=1)
    core.step(block=False)
    assert core.num_in_flight == 1
    assert core.collective_rpc("health")[0]["rank"] == 0
    core.executor.check()
    core.clock.advance(3.0)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        core.executor.check()
    assert len(drain(core)["a"][0]) == 1
    assert core.num_restarts == 1


def test_a_hang_ends_with_the_steps_timeout(model_folder):
    core, got = run(model_folder, [Fault(step=2, kind="hang")], max_worker_restarts=1, step_timeout_s=30.0)
    assert all(reason == "length" for _, reason, _ in got.values())
    assert core.clock.now() > 30.0
    assert "hung for step_timeout_s=30.0" in core.health().restart_cause


def test_a_slow_step(model_folder, undisturbed):
    core, got = run(model_folder, [Fault(step=2, kind="slow", seconds=7.0)])
    assert got == undisturbed
    assert core.clock.now() == 6 * 1.0 + 7.0


def test_a_row_error_ends_its_request_alone(model_folder, undisturbed):
    _, got = run(model_folder, [Fault(step=2, kind="row_error", row=1)])
    assert got["b"][1] == "error"
    assert len(got["b"][0]) == 2
    assert got["b"][0] == undisturbed["b"][0][:2]
    assert {name: got[name] for name in "ac"} == {name: undisturbed[name] for name in "ac"}


def test_a_row_error_of_the_first_row(model_folder):
    _, got = run(model_folder, [Fault(step=0, kind="row_error")])
    assert [name for name, (_, reason, _) in got.items() if reason == "error"] == ["a"]


def test_in_a_run_of_several_steps_a_fault_happens_to_the_run(model_folder):
    """Two faults in one run: the second is in the step after it."""
    faults = [Fault(step=2, kind="slow", seconds=1.0), Fault(step=3, kind="slow", seconds=10.0)]
    core = make_core(make_config(model_folder), faults=faults)
    add(core, "a", [1, 2], max_tokens=8)
    core.step()
    core.step(max_steps=5)
    assert core.clock.now() == 1.0
    core.step()
    assert core.clock.now() == 11.0
