"""Steps that are launched first and finished later, with both executors whose workers may do that."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from pathlib import Path

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S, is_gone

from ringcore.errors import EngineDeadError, RpcTimeoutError, WorkerError
from ringcore.executor import executor_class, worker_host
from ringcore.executor.launched_steps import (
    DEVICE_SPIN_FACTOR,
    FinishedStep,
    is_done,
    launch_step,
    poll_until,
    step_result,
)

SOON_S = 0.05  # in which nothing must happen that must not happen


class Device:
    """The folder of `fake_worker.LaunchedStep`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def end(self, *steps: int) -> None:
        for number in steps:
            (self.folder / f"end {number}").touch()

    def has(self, event: str) -> bool:
        return (self.folder / event).exists()

    def wait_for(self, *events: str) -> None:
        deadline = time.monotonic() + BOUND_S
        while not all(map(self.has, events)):
            assert time.monotonic() < deadline, (events, os.listdir(self.folder))
            time.sleep(0.001)


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path)


@contextlib.contextmanager
def started(name: str, device: Device, num_ranks: int = 1, **parallel):
    config = fake_config(num_ranks, f"steps are launched in {device.folder}", **parallel)
    executor = executor_class(name)(config, worker_factory=FACTORY)
    executor.start()
    try:
        yield executor
    finally:
        device.end(*range(10))
        executor.shutdown()


@pytest.fixture(params=["multiproc", "uniproc"])
def executor(request, device):
    with started(request.param, device) as executor:
        yield executor


def test_a_step_is_launched_before_the_one_before_it_is_taken(executor, device):
    first, second = executor.execute_model(step(1)), executor.execute_model(step(2))
    device.wait_for("launched 1.0", "launched 2.0")
    assert not device.has("taken 1.0")
    assert not first.done()
    device.end(2)
    time.sleep(SOON_S)
    assert not first.done()
    assert not second.done(), "it was taken before the one before it"
    device.end(1)
    assert second.result(BOUND_S).step == 2
    assert first.done()
    assert first.result().token_ids.tolist() == [0, 70]
    assert first.encoded_result() != second.encoded_result()


def test_a_third_step_follows_as_soon_as_the_first_is_there(executor, device):
    futures = [executor.execute_model(step(1)), executor.execute_model(step(2))]
    for number in range(1, 7):
        device.end(number)
        assert futures[-2].result(BOUND_S).step == number
        assert not futures[-1].done()
        futures.append(executor.execute_model(step(number + 2)))
        device.wait_for(f"launched {number + 2}.0")
    device.end(7, 8)
    assert [future.result(BOUND_S).step for future in futures] == list(range(1, 9))


@pytest.mark.parametrize("trouble", [fake_worker.RAISES, fake_worker.RETURNS_NOTHING])
def test_an_error_of_a_launched_step_is_that_steps_error(executor, device, trouble):
    futures = [executor.execute_model(step(1)), executor.execute_model(step(2, trouble))]
    futures.append(executor.execute_model(step(3)))
    device.end(1, 2, 3)
    assert [futures[i].result(BOUND_S).step for i in (0, 2)] == [1, 3]
    with pytest.raises(WorkerError, match="'execute_model' on rank 0") as caught:
        futures[1].result()
    assert caught.value.details["method"] == "execute_model"


def test_a_call_between_two_steps_waits_for_the_one_before_it(device):
    with started("multiproc", device) as executor:
        first, call, last = (
            executor.execute_model(step(1)),
            executor.submit_rpc("count"),
            executor.execute_model(step(2)),
        )
        device.wait_for("launched 1.0")
        assert executor.collective_rpc("peek")[0]["counter"] == 0, "the side thread goes on"
        time.sleep(SOON_S)
        assert not call.done()
        assert not device.has("launched 2.0")
        device.end(1, 2)
        assert call.result(BOUND_S) == [1]
        assert (first.result(BOUND_S).step, last.result(BOUND_S).step) == (1, 2)


def test_a_call_finishes_the_steps_before_it(executor, device):
    futures = [executor.execute_model(step(1, fake_worker.RAISES)), executor.execute_model(step(2))]
    device.end(1, 2)
    assert executor.submit_rpc("count").result(BOUND_S) == [1]
    assert device.has("taken 1.0")
    assert device.has("taken 2.0")
    assert all(future.done() for future in futures)


def test_a_step_that_is_under_way_on_the_device_is_being_executed(executor, device):
    while (before := executor.health()[0]).method is not None:  # a call is answered before it is counted
        time.sleep(0.001)
    futures = [executor.execute_model(step(1)), executor.execute_model(step(2))]
    device.wait_for("launched 2.0")
    time.sleep(SOON_S)
    (health,) = executor.health()
    assert (health.method, health.num_calls) == ("execute_model", before.num_calls)
    assert SOON_S <= health.busy_s < BOUND_S
    assert SOON_S <= executor.oldest_step_s() < BOUND_S
    device.end(1)
    assert futures[0].result(BOUND_S).step == 1
    while (health := executor.health()[0]).num_calls == before.num_calls:
        time.sleep(0.001)
    assert (health.method, health.num_calls) == ("execute_model", before.num_calls + 1)
    device.end(2)
    assert futures[1].result(BOUND_S).step == 2
    while (health := executor.health()[0]).method is not None:
        time.sleep(0.001)
    assert (health.busy_s, health.num_calls) == (0.0, before.num_calls + 2)
    assert executor.oldest_step_s() is None


def test_a_step_that_is_not_over_in_time(executor, device):
    future = executor.execute_model(step(1))
    with pytest.raises(RpcTimeoutError, match="'execute_model'"):
        future.result(SOON_S)
    device.end(1)
    assert future.result(BOUND_S).step == 1


def test_who_sleeps_on_the_descriptors_is_woken(executor, device):
    """Of the executor in this process, a launched step lets nobody sleep: nothing else could wake him."""
    future = executor.execute_model(step(1))
    device.end(1)
    while not future.done():
        assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
    while select.select(executor.wait_fds(), [], [], 0)[0]:
        executor.check()
    assert future.result().step == 1


def test_every_rank_takes_its_results_and_tells_its_errors(device):
    with started("multiproc", device, 2) as executor:
        futures = [executor.execute_model(step(1)), executor.execute_model(step(2, fake_worker.RAISES_ON_RANK_1))]
        device.wait_for("launched 2.0", "launched 2.1")
        device.end(1)
        assert futures[0].result(BOUND_S).step == 1
        device.wait_for("taken 1.1")
        assert not device.has("taken 2.1")
        device.end(2)
        while executor.health()[1].method is not None:  # until its reply is there
            time.sleep(0.001)
        executor.check()
        futures.append(executor.execute_model(step(3)))
        device.end(3)
        with pytest.raises(WorkerError, match="step 2 on rank 1") as caught:  # of that step, or of the one after it
            _ = [future.result(BOUND_S) for future in futures]
        assert caught.value.details["rank"] == 1


def test_shutdown_takes_what_is_on_the_device(executor, device):
    futures = [executor.execute_model(step(1)), executor.execute_model(step(2, fake_worker.RAISES))]
    device.wait_for("launched 2.0")
    device.end(1, 2)
    executor.shutdown()
    device.wait_for("taken 1.0", "taken 2.0")
    for future in futures:
        assert future.done()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute_model(step(3))


def test_shutdown_does_not_wait_for_ever(device, monkeypatch):
    monkeypatch.setattr(worker_host, "GRACE_S", 0.05)
    with started("multiproc", device) as executor:
        pids, future = executor.pids(), executor.execute_model(step(1))
        device.wait_for("launched 1.0")
        executor.shutdown()
        assert all(map(is_gone, pids.values()))
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()


def test_a_worker_that_dies_with_steps_on_the_device(device):
    with started("multiproc", device) as executor:
        futures = [executor.execute_model(step(1)), executor.execute_model(step(2))]
        device.wait_for("launched 2.0")
        os.kill(executor.pids()["worker 0"], signal.SIGKILL)
        for future in futures:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                future.result(BOUND_S)


def test_a_launched_step_that_hangs_is_named(device):
    with started("multiproc", device, step_timeout_s=0.3) as executor:
        futures = [executor.execute_model(step(1)), executor.execute_model(step(2))]
        for future in futures:
            with pytest.raises(EngineDeadError, match=r"step 1 hung: rank 0 .*in 'execute_model' for"):
                future.result(BOUND_S)


def test_the_workers_end_with_their_parent(device):
    """The steps never end; the worker sees it all the same, as the kernel's signal and by its own looking."""
    read_fd, write_fd = os.pipe()
    parent = os.fork()
    if parent == 0:
        with contextlib.suppress(BaseException), started("multiproc", device) as executor:
            executor.execute_model(step(1))
            device.wait_for("launched 1.0")
            os.write(write_fd, f"{executor.pids()['worker 0']}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    os.close(write_fd)
    os.waitpid(parent, 0)
    pid = os.read(read_fd, 100)
    os.close(read_fd)
    assert pid
    assert is_gone(int(pid))


# ---------------------------------------------------------------------------------------------------------------
# The parts.


class _Worker:
    def __init__(self, output: object) -> None:
        self._output = output

    def execute_model(self, scheduler_output):
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


def test_a_step_that_was_not_launched_is_over():
    output = fake_worker.FakeWorker(fake_config(), 0, None).execute_model(step(4))
    over = launch_step(_Worker(output), step(4))
    assert over.done()
    assert step_result(over) is output
    silent = launch_step(_Worker(None), step(4))
    assert silent.result() is None
    with pytest.raises(TypeError, match="returned None"):
        step_result(silent)
    failed = launch_step(_Worker(KeyError("x")), step(4))
    assert failed.done()
    with pytest.raises(KeyError):
        failed.result()


def test_a_step_that_cannot_be_asked_tells_why_in_its_result():
    class Broken(FinishedStep):
        def done(self) -> bool:
            raise RuntimeError("the device is lost")

    assert is_done(Broken(error=RuntimeError("the device is lost")))


def test_looking_out_spins_then_naps_and_checks():
    looks, checks = itertools.count(), itertools.count()
    assert poll_until(lambda: next(looks) >= 1000, 1.0, check=lambda: next(checks))
    assert next(checks) == 0, "it napped within its patience"
    assert poll_until(lambda: next(looks) >= 1010, 0.0, check=lambda: next(checks))
    assert next(checks) > 5
    began = time.monotonic()
    assert not poll_until(lambda: False, SOON_S / DEVICE_SPIN_FACTOR / 2, began + SOON_S)
    assert SOON_S <= time.monotonic() - began < BOUND_S

    def peer_is_gone() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        poll_until(lambda: False, 0.0, check=peer_is_gone)
