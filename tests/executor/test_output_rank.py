"""The output rank is another than 0: it alone answers a step, and its death is that of any rank."""

from __future__ import annotations

import os
import signal

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S

from ringcore.config import RankLayout
from ringcore.errors import EngineDeadError, RpcTimeoutError, WorkerError
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.testing import FakeExecutor, Fault

LAYOUT = RankLayout(hosts=("localhost", "localhost"), output_rank=1)


@pytest.fixture
def executor():
    executor = MultiprocExecutor(fake_config(2, ranks=LAYOUT), worker_factory=FACTORY)
    executor.start()
    yield executor
    executor.shutdown()


def test_a_step_waits_for_the_output_rank_alone(executor, tmp_path):
    gate = tmp_path / "gate"
    executor.submit_rpc("wait_for_file", [str(gate), 0])  # keeps rank 0 busy
    assert executor.execute_model(step(1)).result(BOUND_S).step == 1
    executor.submit_rpc("wait_for_file", [str(gate), 1])
    late = executor.execute_model(step(2))
    with pytest.raises(RpcTimeoutError) as caught:
        late.result(0.1)
    assert caught.value.details["missing_ranks"] == [1]
    gate.touch()
    assert late.result(BOUND_S).step == 2


@pytest.mark.parametrize("trouble", [fake_worker.RAISES_ON_RANK_1, fake_worker.RETURNS_NOTHING])
def test_its_error_is_the_steps(executor, trouble):
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(step(1, trouble)).result(BOUND_S)
    assert [failure["rank"] for failure in caught.value.details["failures"]] == [1]


def test_it_dies_in_a_step_and_is_replaced(executor):
    with pytest.raises(EngineDeadError) as caught:
        executor.execute_model(step(1, fake_worker.KILLS_RANK_1_RAISES_ON_0)).result(BOUND_S)
    assert (caught.value.details["rank"], caught.value.details["signal"]) == (1, "SIGKILL")
    executor.restart()
    assert executor.execute_model(step(2)).result(BOUND_S).step == 2
    assert executor.collective_rpc("nap", [0.0]) == [0, 1]


def test_the_death_of_another_rank_ends_the_step_too(executor):
    executor.submit_rpc("nap", [600.0])
    late = executor.execute_model(step(1))
    os.kill(executor.pids()["worker 0"], signal.SIGKILL)
    with pytest.raises(EngineDeadError) as caught:
        late.result(BOUND_S)
    assert caught.value.details["rank"] == 0


def test_of_fake_workers():
    config = fake_config(2, ranks=LAYOUT, step_timeout_s=1.0)
    executor = FakeExecutor(config, worker_factory=FACTORY, faults=[Fault(step=1, kind="death")])
    executor.start()
    assert executor.execute_model(step(1)).result().step == 1
    with pytest.raises(EngineDeadError, match="worker 1 was killed") as caught:
        executor.execute_model(step(2)).result()
    assert caught.value.details["rank"] == 1
    executor.restart()
    with pytest.raises(WorkerError, match="on rank 1"):
        executor.execute_model(step(3, fake_worker.RETURNS_NOTHING)).result()
    executor.shutdown()
