"""What only workers in processes of their own can do: die, lag, outlive, and answer too late."""

from __future__ import annotations

import os
import select
import signal
import time

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S, is_gone
from running_executor import running

from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, RpcTimeoutError, WorkerError
from ringcore.executor import worker_host
from ringcore.executor.multiproc import MultiprocExecutor


@pytest.fixture(scope="module")
def pair():
    with running(2) as executor:
        yield executor


def test_processes_that_are_begun_before_the_start_are_its():
    executor = MultiprocExecutor(fake_config(1), worker_factory=FACTORY)
    try:
        executor.begin()
        begun = executor.pids()
        assert list(begun) == ["worker 0"]
        assert next(iter(executor.start())) == "start_workers"
        assert executor.pids() == begun
        assert [value["pid"] for value in executor.collective_rpc("who")] == list(begun.values())
        with pytest.raises(AssertionError, match="twice"):
            executor.start()
    finally:
        executor.shutdown()
    assert is_gone(begun["worker 0"])


def test_processes_that_are_begun_and_never_started_end():
    executor = MultiprocExecutor(fake_config(1), worker_factory=FACTORY)
    executor.begin()
    (pid,) = executor.pids().values()
    executor.shutdown()
    assert is_gone(pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.start()


# ---------------------------------------------------------------------------------------------------------------
# Two ranks.


def test_values_are_in_rank_order(pair):
    for _ in range(50):
        assert [value["rank"] for value in pair.collective_rpc("who")] == [0, 1]
    assert pair.collective_rpc("nap", [0.03], {"on_rank": 0}) == [0, 1]


def test_each_rank_is_a_process_of_its_own(pair):
    assert pair.pids() == {f"worker {i}": value["pid"] for i, value in enumerate(pair.collective_rpc("who"))}
    assert os.getpid() not in pair.pids().values()


def test_what_a_worker_imports_is_no_garbage_to_look_for(pair):
    for is_enabled, num_frozen in pair.collective_rpc("collection"):
        assert is_enabled
        assert num_frozen > 10_000


def test_the_ranks_meet_in_a_private_file_without_a_name(private_tmp):
    with running(2) as executor:
        first, second = executor.collective_rpc("who")
        assert first["meeting"] == second["meeting"]
        assert first["meeting"][2:] == [0o600, 0]
        assert list(private_tmp.iterdir()) == []
    with running(1) as executor:
        assert executor.collective_rpc("who")[0]["meeting"] is None


def test_large_messages_by_zmq_leave_no_name(private_tmp):
    with running(2, large_messages="zmq", call_ring_bytes=1 << 16, reply_ring_bytes=1 << 16) as executor:
        for size in (10, 40_000, 3 << 20):
            assert executor.collective_rpc("sizes", [bytes(size)]) == [size] * 2
            assert executor.collective_rpc("zeros", [size]) == [bytes(size)] * 2
            assert executor.collective_rpc("large_peek", [size]) == [bytes(size)] * 2
        pids = executor.pids()
        os.kill(pids["worker 1"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            executor.collective_rpc("sizes", [bytes(3 << 20)])
    assert list(private_tmp.iterdir()) == []


def test_the_output_rank_answers_for_a_step(pair):
    futures = [pair.execute_model(step(i)) for i in range(30)]
    assert [future.result(BOUND_S).step for future in futures] == list(range(30))


def test_the_error_of_one_rank_names_it(pair):
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("fail", ["x", 1])
    assert caught.value.details["rank"] == 1
    assert pair.collective_rpc("echo", [2]) == [2, 2]


def test_the_errors_of_all_ranks_are_told(pair):
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("fail", ["x"])
    assert caught.value.details["rank"] == 0
    assert {rank: error.details["rank"] for rank, error in caught.value.failures.items()} == {0: 0, 1: 1}
    assert "raise KeyError(kind)" in str(caught.value.failures[1].__cause__)


def test_one_rank_replies_and_all_execute(pair, tmp_path):
    executed = tmp_path / "executed"
    assert pair.collective_rpc("announce", [str(executed), 0], unique_reply_rank=1) == 1
    assert pair.collective_rpc("who", unique_reply_rank=0)["rank"] == 0
    assert executed.exists(), "rank 0 has executed the call before, in order"
    late = pair.num_late_replies
    assert pair.collective_rpc("unencodable_but_on", [0], unique_reply_rank=0) == 0
    assert pair.collective_rpc("echo") == [None, None]
    assert pair.num_late_replies == late, "the others encode and send nothing"
    for rank in (2, -1, 1.0):
        with pytest.raises(InvalidRequestError, match="give None, or a rank from 0 to 1"):
            pair.submit_rpc("who", unique_reply_rank=rank)


def test_the_error_of_a_rank_that_owes_no_reply_does_not_wait_for_the_one_that_does(pair, tmp_path):
    gate = tmp_path / "gate"
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("wait_for_file", [str(gate), 0, 1], unique_reply_rank=0)
    assert list(caught.value.failures) == [1]
    gate.touch()
    assert pair.collective_rpc("echo") == [None, None]


def test_read_only_calls_are_answered_in_the_middle_of_another(pair, tmp_path):
    """Both ranks: one is in the middle of a call, the other has nothing to do."""
    gate = tmp_path / "gate"
    busy, behind = pair.submit_rpc("wait_for_file", [str(gate), 0]), pair.submit_rpc("who")
    for _ in range(20):
        answers = pair.collective_rpc("peek", timeout=BOUND_S)
        assert [answer["rank"] for answer in answers] == [0, 1]
        assert {answer["thread"] for answer in answers} == {"read-only calls"}
    assert pair.collective_rpc("peek", unique_reply_rank=1)["rank"] == 1
    with pytest.raises(WorkerError, match="KeyError"):
        pair.collective_rpc("fail_to_peek", ["x"])
    assert pair.collective_rpc("large_peek", [9 << 20])[1] == bytes(9 << 20)  # does not fit the ring
    assert not busy.done()
    gate.touch()
    assert busy.result(BOUND_S) == [0, 1]
    assert [value["rank"] for value in behind.result(BOUND_S)] == [0, 1]


def test_read_only_calls_with_large_arguments_and_many_at_once(pair):
    futures = [pair.submit_rpc("large_peek", [i << 10]) for i in range(200)]
    assert [len(future.result(BOUND_S)[0]) for future in futures] == [i << 10 for i in range(200)]
    with pytest.raises(InvalidRequestError, match="Expected `int`"):
        pair.collective_rpc("large_peek", [bytes(3 << 20)])  # above the side ring's half


def test_a_side_thread_that_ends_takes_its_worker_along():
    with running() as executor, pytest.raises(EngineDeadError, match="exit code 1") as caught:
        executor.collective_rpc("exit_in_control_thread")
    assert any("SystemExit: 3" in line for line in caught.value.details["last_log"])


def test_an_error_does_not_wait_for_a_rank_that_hangs_and_its_late_reply_is_dropped(pair, tmp_path):
    before, gate = pair.num_late_replies, tmp_path / "gate"
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("wait_for_file", [str(gate), 0, 1])
    assert caught.value.details["rank"] == 1
    gate.touch()
    assert pair.collective_rpc("echo", ["B"]) == ["B", "B"]
    assert pair.num_late_replies - before == 1


def test_a_timeout_names_the_missing_ranks_and_no_late_reply_answers_another_call(pair, tmp_path):
    before, gate = pair.num_late_replies, tmp_path / "gate"
    with pytest.raises(RpcTimeoutError) as caught:
        pair.collective_rpc("wait_for_file", [str(gate), 1], timeout=0.3)
    assert caught.value.details["missing_ranks"] == [1]
    gate.touch()
    assert [pair.collective_rpc("echo", [i]) for i in range(5)] == [[i, i] for i in range(5)]
    assert pair.num_late_replies - before == 1


def test_asking_with_a_timeout_does_not_give_the_call_up(pair, tmp_path):
    gate = tmp_path / "gate"
    future = pair.submit_rpc("wait_for_file", [str(gate), 0])
    with pytest.raises(RpcTimeoutError):
        future.result(timeout=0.01)
    assert not future.done()
    gate.touch()
    assert future.result(BOUND_S) == [0, 1]


def test_a_call_past_its_deadline_is_done(pair, tmp_path):
    gate = tmp_path / "gate"
    future = pair.submit_rpc("wait_for_file", [str(gate), 0], timeout=0.02)
    deadline = time.monotonic() + BOUND_S
    while not future.done():
        assert time.monotonic() < deadline
    with pytest.raises(RpcTimeoutError):
        future.result()
    gate.touch()
    assert pair.collective_rpc("echo") == [None, None]


def test_done_by_descriptor(pair):
    """As an event loop waits: sleep on the descriptors, ask, sleep again; they fall silent when all is taken."""
    future = pair.submit_rpc("nap", [0.02])
    while not future.done():
        assert select.select(pair.wait_fds(), [], [], BOUND_S)[0]
    assert future.result() == [0, 1]
    idle = pair.submit_rpc("echo")
    assert idle.result(BOUND_S) == [None, None]
    slow = pair.submit_rpc("nap", [0.05])
    while select.select(pair.wait_fds(), [], [], 0)[0]:
        assert not slow.done() or slow.result() == [0, 1]
    assert slow.result(BOUND_S) == [0, 1]


def test_many_large_calls_at_once_do_not_block_each_other(pair):
    """More replies than the reply rings hold, more calls than the call ring holds, and nobody asks meanwhile."""
    futures = [pair.submit_rpc("echo", [bytes([i]) * (3 << 20)]) for i in range(40)]
    for i, future in enumerate(futures):
        assert future.result(BOUND_S) == [bytes([i]) * (3 << 20)] * 2


def test_a_rank_that_fails_after_the_output_rank_answered_fails_the_steps_after():
    with running(2) as executor:
        future = executor.execute_model(step(0, fake_worker.RAISES_ON_RANK_1))
        # A call after the step settles only when rank 1 has reported the step, in whichever order the two replied.
        assert executor.collective_rpc("echo") == [None, None]
        with pytest.raises(WorkerError, match="step 0 on rank 1"):
            _all_results([future, executor.execute_model(step(1))])


def _all_results(futures):
    return [future.result(BOUND_S) for future in futures]


def test_rings_of_any_configured_size():
    with running(2, call_ring_bytes=70_000, reply_ring_bytes=65_537) as executor:
        for size in (0, 30_000, 40_000, 1 << 20):
            assert executor.collective_rpc("echo", [bytes(size)]) == [bytes(size)] * 2
        futures = [executor.submit_rpc("echo", [bytes([i]) * 20_000]) for i in range(50)]
        for i, future in enumerate(futures):
            assert future.result(BOUND_S) == [bytes([i]) * 20_000] * 2


# ---------------------------------------------------------------------------------------------------------------
# The environment of a worker.


def test_threads_and_network_of_a_worker(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_host, "usable_cores", lambda: 5)
    with running(2) as executor:
        assert executor.collective_rpc("environment", ["OMP_NUM_THREADS"]) == ["2", "2"]
        assert executor.collective_rpc("environment", ["OMP_WAIT_POLICY"]) == ["PASSIVE"] * 2
        assert executor.collective_rpc("environment", ["GLOO_SOCKET_IFNAME"]) == ["lo", "lo"]


@pytest.mark.parametrize(
    ("user", "cores", "workers", "ours"),
    [
        ({}, 1, 1, {"OMP_NUM_THREADS": "1"}),
        ({}, 2, 4, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}),
        ({}, 8, 1, {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}),
        ({"OMP_NUM_THREADS": "1"}, 8, 1, {}),
        ({"OMP_NUM_THREADS": "3"}, 1, 1, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 8, 1, {"OMP_NUM_THREADS": "8"}),
        (
            {"GOMP_SPINCOUNT": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_NVLS_ENABLE": "1"},
            8,
            2,
            {"OMP_NUM_THREADS": "4"},
        ),
    ],
)
def test_the_user_environment_comes_first(user, cores, workers, ours):
    assert worker_host.worker_environment(user | {"TRITON_HOME": "/theirs"}, cores, workers) == ours


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", None),
    ],
)
def test_the_heap_of_a_worker_on_a_cpu_is_in_huge_pages_unless_the_user_says_otherwise(given, ours):
    user = {} if given is None else {"GLIBC_TUNABLES": given}
    assert worker_host.heap_in_huge_pages(user).get("GLIBC_TUNABLES") == ours


@pytest.mark.parametrize(
    ("shown", "device_ids", "visible"), [(None, [2, 0], "2,0"), ("4,5,GPU-9", [2, 0], "GPU-9,4"), ("", [], "")]
)
def test_the_gpus_of_the_workers(shown, device_ids, visible):
    user = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    ours = worker_host.worker_environment(user, 1, 1, device_ids)
    assert ours["CUDA_VISIBLE_DEVICES"] == visible


def test_gpus_that_are_not_shown():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='4,5' shows 2 GPUs; give numbers below that"):
        worker_host.worker_environment({"CUDA_VISIBLE_DEVICES": "4,5"}, 1, 1, [2])


@pytest.mark.parametrize(
    ("user", "folder"),
    [
        ({"HOME": "/home/her"}, "/home/her/.cache/ringcore/triton"),
        ({"HOME": "/home/her", "XDG_CACHE_HOME": "/caches"}, "/caches/ringcore/triton"),
        ({"TRITON_CACHE_DIR": "/theirs"}, None),
    ],
)
def test_where_compiled_kernels_are_kept(user, folder):
    assert worker_host.worker_environment(user, 1, 1).get("TRITON_CACHE_DIR") == folder


def test_a_worker_ignores_ctrl_c():
    with running() as executor:
        assert executor.collective_rpc("interrupt_yourself") == ["still here"]


def test_the_parts_of_a_phase_are_those_of_the_slowest_rank():
    with running(2) as executor:
        phases = executor.restart()
    assert list(phases) == [
        "start_workers",
        "start_workers.boot",
        "start_workers.create",
        "init_device",
        "load_model",
        "load_model.weights",
    ]
    assert phases["load_model.weights"] == 0.5
    assert 0 < phases["start_workers.create"] <= phases["start_workers"]
    assert 0 < phases["start_workers.boot"] <= phases["start_workers"]
