"""The engine in a process of its own, its workers (fake, torch-free) in theirs."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_engine import (
    KILLS_ONCE,
    RAISES,
    SLOW,
    BrokenMultiproc,
    FakeMultiproc,
    FragileMultiproc,
    expected,
    hurried,
    make_model_folder,
)
from process_stat import is_alive

from ringcore import EngineConfig, SamplingParams
from ringcore.engine_core.transport.framing import MAX_BUFFER_BYTES
from ringcore.errors import (
    CapacityError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RpcTimeoutError,
    WorkerDiedError,
    WorkerError,
)
from ringcore.front_end.client import EngineCoreClient
from ringcore.protocol.requests import EngineCoreRequest

WAIT_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_config(folder, executor=FakeMultiproc, **options):
    return EngineConfig.from_options(
        model=folder, load_format="dummy", executor=executor, **({"max_model_len": 128, "block_size": 8} | options)
    )


@pytest.fixture(scope="module")
def shared(folder):
    """One engine for the tests that leave it as it was."""
    with EngineCoreClient(make_config(folder)) as client:
        yield client


def request(request_id, prompt, **params):
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(**({"max_tokens": 4} | params)), arrival_s=time.monotonic()
    )


def collect(client, request_ids):
    """Every output of these requests, until each has its last."""
    outputs, unfinished = [], set(request_ids)
    deadline = time.monotonic() + WAIT_S
    while unfinished:
        assert time.monotonic() < deadline, f"no end of {unfinished}"
        outputs += [o for o in client.get_outputs(timeout=1).outputs if o.request_id in set(request_ids)]
        unfinished -= {o.request_id for o in outputs if o.finish_reason}
    return outputs


def tokens(outputs, request_id):
    return [t for output in outputs if output.request_id == request_id for t in output.new_token_ids]


def wait_until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_ready_describes_the_engine(shared):
    ready = shared.ready
    assert ready.max_model_len == 128
    assert ready.token_capacity == ready.num_blocks * 8
    assert set(ready.pids) == {"engine", "worker 0"}
    assert all(is_alive(pid) for pid in ready.pids.values())
    assert os.getpid() not in ready.pids.values()


def test_the_engine_process_is_small_and_knows_no_torch(shared):
    status = Path(f"/proc/{shared.ready.pids['engine']}/status").read_text()
    resident_kb = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    assert resident_kb < 60 * 1024
    assert "libtorch" not in Path(f"/proc/{shared.ready.pids['engine']}/maps").read_text()


def test_tokens_come_back(shared):
    prompts = {f"r{i}": [i + 1] * n for i, n in enumerate([1, 8, 30])}
    shared.add_requests([request(name, prompt) for name, prompt in prompts.items()])
    outputs = collect(shared, prompts)
    for name, prompt in prompts.items():
        assert tokens(outputs, name) == expected(prompt, 4)


def test_a_wrong_request_fails_alone(shared):
    shared.add_requests([request("bad", [5] * 200), request("good", [5]), request("worse", [4000])])
    outputs = collect(shared, ["bad", "good", "worse"])
    errors = {o.request_id: o.error for o in outputs if o.error}
    assert {name: error.type for name, error in errors.items()} == {
        "bad": "InvalidRequestError",
        "worse": "InvalidRequestError",
    }
    assert tokens(outputs, "good") == expected([5], 4)


def test_many_requests_at_once(shared):
    prompts = {f"m{i}": [1 + i % 250, 7] for i in range(600)}
    shared.add_requests([request(name, prompt, max_tokens=2) for name, prompt in prompts.items()])
    outputs = collect(shared, prompts)
    assert all(tokens(outputs, name) == expected(prompt, 2) for name, prompt in prompts.items())


def test_an_abort_and_a_call_do_not_wait_for_the_steps(shared):
    shared.add_requests([request("slow", [SLOW], max_tokens=100)])
    while not shared.get_outputs(timeout=WAIT_S).outputs:
        pass
    assert shared.call_engine("stats", timeout=WAIT_S)["num_running"] == 1
    shared.abort(["slow"])
    assert collect(shared, ["slow"])[-1].finish_reason == "abort"
    assert shared.call_engine("stats", timeout=WAIT_S)["num_running"] == 0


def test_get_outputs_ends_at_its_deadline(shared):
    assert shared.get_outputs(timeout=0.02).outputs == []


def test_collective_rpc(shared):
    assert shared.collective_rpc("echo", ["ab"], {"times": 2}) == ["0:abab"]
    with pytest.raises(WorkerError, match="no such thing") as caught:
        shared.collective_rpc("fail")
    assert caught.value.details["error_type"] == "KeyError"
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        shared.collective_rpc("echo", [object()])
    assert shared.collective_rpc("echo", ["still here"]) == ["0:still here"]


def test_a_call_that_takes_too_long_spoils_nothing(shared, folder):
    with pytest.raises(RpcTimeoutError) as caught:
        shared.collective_rpc("nap", [WAIT_S], timeout=0.05)
    assert caught.value.details["missing_ranks"] == [0]
    with hurried(folder):
        assert shared.collective_rpc("echo", ["next"], timeout=WAIT_S) == ["0:next"]


def test_values_too_large_for_the_ring_and_arguments_too_large_for_any(shared):
    assert shared.collective_rpc("zeros", [70 << 20], timeout=60) == [bytes(70 << 20)]
    with pytest.raises(InvalidRequestError, match=r"above the limit.*send less per call"):
        shared.collective_rpc("doubled", [np.zeros(MAX_BUFFER_BYTES, np.uint8)])
    assert shared.collective_rpc("zeros", [3]) == [bytes(3)]


def test_arrays_there_and_back(shared):
    array = np.arange(200_000, dtype=np.int64)
    (doubled,) = shared.collective_rpc("doubled", [array])
    np.testing.assert_array_equal(doubled, array * 2)
    doubled[0] = 7  # it is the caller's own


def test_one_reply_of_one_rank(shared):
    assert shared.collective_rpc("echo", ["x"], unique_reply_rank=0) == "0:x"
    with pytest.raises(InvalidRequestError, match="unique_reply_rank=1"):
        shared.collective_rpc("echo", ["x"], unique_reply_rank=1)


def test_a_function_is_refused_before_it_is_sent(shared):
    with pytest.raises(InvalidRequestError, match="allow_callables=True") as caught:
        shared.collective_rpc(lambda worker: worker.rank)
    assert caught.value.details["field"] == "method"
    with pytest.raises(InvalidRequestError, match="method"):
        shared.collective_rpc(17)


def test_functions_where_they_are_allowed(folder):
    factor = 7
    with EngineCoreClient(make_config(folder, allow_callables=True, tensor_parallel_size=2)) as client:
        assert client.collective_rpc(lambda worker, plus: worker.rank * factor + plus, [1]) == [1, 8]
        assert client.collective_rpc(lambda worker: worker.rank, unique_reply_rank=1) == 1
        with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
            client.collective_rpc(lambda worker: 1 // worker.rank)
        assert list(caught.value.failures) == [0]


def test_an_unknown_method_of_the_engine_names_the_known(shared):
    with pytest.raises(InvalidRequestError, match="health, is_sleeping, kv_blocks, methods, pause, reload_weights"):
        shared.call_engine("explode")
    assert shared.reset_prefix_cache() is True


def test_a_pause_is_the_engines(shared):
    shared.pause("all")
    try:
        shared.add_requests([request("paused", [5, 6], max_tokens=3)])
        assert shared.get_outputs(0.05).outputs == []
    finally:
        shared.resume()
    assert tokens(collect(shared, ["paused"]), "paused") == expected([5, 6], 3)
    with pytest.raises(InvalidRequestError, match="give 'new' or 'all'"):
        shared.pause("now")
    with pytest.raises(InvalidRequestError, match="arguments are wrong"):
        shared.call_engine("pause", ("new", "all"))


def test_sleep_and_wake_up(folder):
    with EngineCoreClient(make_config(folder, enable_sleep_mode=True, tensor_parallel_size=2)) as client:
        prompts = {f"r{i}": [i + 1, SLOW] for i in range(3)}
        client.add_requests([request(request_id, prompt, max_tokens=60) for request_id, prompt in prompts.items()])
        outputs = client.get_outputs().outputs
        report = client.sleep(1, mode="keep")
        assert report.states == {"weights": "offloaded", "kv_cache": "discarded"}
        assert [rank["copied_bytes"] for rank in report.ranks] == [10.0, 11.0]
        assert client.is_sleeping()
        health = client.health()
        assert (health.state, health.memory, health.num_waiting) == ("sleeping", report.states, 3)
        client.add_requests([request("refused", [1])])
        refused = [output for output in outputs + collect(client, ["refused"]) if output.request_id == "refused"]
        assert refused[0].error.type == "SleepingError"
        assert client.collective_rpc("memory_states") == [report.states] * 2
        assert client.wake_up(["kv_cache"]).states["weights"] == "offloaded"
        assert client.collective_rpc("wake_up") == [{"copied_bytes": 10.0 + i, "residue_bytes": 5.0} for i in range(2)]
        with hurried(folder):
            outputs = [output for output in outputs if output.request_id in prompts] + collect(client, prompts)
        for request_id, prompt in prompts.items():
            assert tokens(outputs, request_id)[-2:] == expected(prompt, 60)[-2:]
        with pytest.raises(InvalidRequestError, match="tags="):
            client.wake_up(["graphs"])


def test_sleep_lets_requests_finish_and_the_engine_answers_meanwhile(folder):
    with EngineCoreClient(make_config(folder, enable_sleep_mode=True)) as client:
        client.wait_ready()
        client.add_requests([request("slow", [1, SLOW], max_tokens=120)])
        with pytest.raises(RpcTimeoutError):
            client.sleep(2, mode="wait", timeout=0.05)
        assert client.health().state == "ready"
        with hurried(folder):
            assert tokens(collect(client, ["slow"]), "slow") == expected([1, SLOW], 120)
        wait_until(client.is_sleeping, "the sleep that nobody waits for")
        client.wake_up()
        client.reload_weights("/models/3")
        client.add_requests([request("after", [1], max_tokens=4)])
        assert tokens(collect(client, ["after"]), "after") == expected([1], 4, 3)


def test_the_health_of_an_engine_that_serves(shared):
    health = shared.health(timeout=WAIT_S)
    assert (health.state, health.error, health.num_restarts) == ("ready", None, 0)
    assert [(rank.rank, rank.pid) for rank in health.ranks] == [(0, shared.ready.pids["worker 0"])]


def test_calls_from_other_threads_while_one_waits_for_outputs(shared):
    shared.add_requests([request("a", [SLOW, 3], max_tokens=30)])
    answers: list = []

    def ask(i):
        answers.append((i, shared.collective_rpc("echo", [str(i)], timeout=WAIT_S)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    outputs = collect(shared, ["a"])
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(answers) == [(i, [f"0:{i}"]) for i in range(6)]
    assert tokens(outputs, "a") == expected([SLOW, 3], 30)


def test_an_idle_engine_sleeps(shared, folder):
    def cpu_ticks():
        fields = Path(f"/proc/{shared.ready.pids['engine']}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with pytest.raises(RpcTimeoutError):  # its late reply must not keep the loop awake
        shared.collective_rpc("nap", [WAIT_S], timeout=0.01)
    with hurried(folder):
        shared.collective_rpc("echo", ["x"])  # behind it
    before = cpu_ticks()
    time.sleep(0.5)
    assert cpu_ticks() - before <= 5  # of 50: it would take all it gets if it did not sleep


def test_two_ranks(folder):
    with EngineCoreClient(make_config(folder, tensor_parallel_size=2)) as client:
        assert client.collective_rpc("echo", ["x"]) == ["0:x", "1:x"]
        assert client.collective_rpc("echo", ["x"], unique_reply_rank=1) == "1:x"
        with pytest.raises(WorkerError, match="rank 0") as caught:
            client.collective_rpc("fail_on", [[0, 1]])
        assert {rank: error.details["error_type"] for rank, error in caught.value.failures.items()} == {
            0: "KeyError",
            1: "KeyError",
        }
        client.add_requests([request("a", [9])])
        assert tokens(collect(client, ["a"]), "a") == expected([9], 4)
        assert set(client.ready.pids) == {"engine", "worker 0", "worker 1"}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"executor": BrokenMultiproc}, ModelLoadError, "tensor 'x' is missing"),
        ({"kv_cache_bytes": 4096}, CapacityError, "max_model_len"),
    ],
)
def test_a_failed_start_raises_what_stopped_it(folder, options, error, says):
    client = EngineCoreClient(make_config(folder, **options))
    for _ in range(2):
        with pytest.raises(error, match=says) as caught:
            client.wait_ready()
    assert caught.value.details
    with pytest.raises(error):
        client.add_requests([request("a", [1])])
    client.close()


def kill_engine(pids):
    os.kill(pids["engine"], signal.SIGKILL)


def kill_worker(pids):
    os.kill(pids["worker 0"], signal.SIGKILL)


def terminate_engine(pids):
    os.kill(pids["engine"], signal.SIGTERM)


@pytest.mark.parametrize(
    ("kill", "process", "name", "busy"),
    [
        (kill_engine, "engine", "SIGKILL", True),
        (kill_worker, "worker 0", "SIGKILL", False),
        (kill_worker, "worker 0", "SIGKILL", True),
        (terminate_engine, "engine", "SIGTERM", True),
    ],
)
def test_a_death_is_told_to_every_call_and_leaves_no_process(folder, kill, process, name, busy):
    client = EngineCoreClient(make_config(folder))
    pids = client.ready.pids
    if busy:
        client.add_requests([request("a", [SLOW], max_tokens=100)])
        client.get_outputs(timeout=WAIT_S)
    errors: list = []

    def wait_for_outputs():
        try:
            while True:
                client.get_outputs()
        except EngineDeadError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait_for_outputs)
    waiting.start()
    kill(pids)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert errors[0].details["process"] == process
    assert errors[0].details["signal"] == name
    for call in (
        lambda: client.add_requests([request("b", [1])]),
        lambda: client.abort(["a"]),
        client.get_outputs,
        lambda: client.collective_rpc("echo", ["x"]),
    ):
        with pytest.raises(EngineDeadError):
            call()
    health = client.health()
    assert (health.state, health.error) == ("dead", errors[0].message)
    client.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), "a process outlived its engine")


def test_an_error_in_a_step_ends_the_engine_with_its_cause(folder):
    with EngineCoreClient(make_config(folder)) as client:
        client.add_requests([request("a", [RAISES])])
        with pytest.raises(EngineDeadError, match="the forward pass failed") as caught:
            collect(client, ["a"])
        assert caught.value.details["error_type"] == "ZeroDivisionError"


def test_interrupts_are_left_to_the_front_end(shared):
    for pid in shared.ready.pids.values():
        os.kill(pid, signal.SIGINT)
    assert shared.collective_rpc("echo", ["x"], timeout=WAIT_S) == ["0:x"]


def test_close_is_idempotent_and_final(folder):
    client = EngineCoreClient(make_config(folder))
    pids = client.ready.pids
    client.close()
    client.close()
    assert not any(is_alive(pid) for pid in pids.values())
    with pytest.raises(EngineDeadError, match="closed"):
        client.get_outputs()
    with pytest.raises(EngineDeadError, match="closed"):
        client.add_requests([request("a", [1])])


def test_close_wakes_whoever_waits(folder):
    client = EngineCoreClient(make_config(folder))
    client.wait_ready()
    raised: list = []

    def wait_for_outputs():
        try:
            client.get_outputs()
        except EngineDeadError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait_for_outputs)
    waiting.start()
    wait_until(lambda: client._mailbox.is_receiving, "nobody waits")
    client.close()
    waiting.join(WAIT_S)
    assert [error.message for error in raised] == ["the engine was closed"]


def test_what_is_sent_while_it_starts_is_served(folder):
    with EngineCoreClient(make_config(folder)) as client:
        client.add_requests([request("early", [4, 2])])
        assert tokens(collect(client, ["early"]), "early") == expected([4, 2], 4)


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_closing_while_it_starts(own_folder, after_s):
    Path(own_folder, "holds").touch()
    client = EngineCoreClient(make_config(own_folder, FragileMultiproc))
    time.sleep(after_s)
    client.close()
    with pytest.raises(EngineDeadError):
        client.wait_ready()


def test_a_start_that_takes_too_long_ends_at_its_deadline(folder):
    client = EngineCoreClient(make_config(folder), start_timeout_s=0.0)
    with pytest.raises(EngineDeadError, match=r"not ready within 0\.0 s"):
        client.wait_ready()


# ---------------------------------------------------------------------------------------------------------------
# Engines that are silent, and engines that heal.


def test_health_tells_starting_ready_and_dead(folder):
    client = EngineCoreClient(make_config(folder))
    assert client.health().state == "starting"
    client.wait_ready()
    assert client.health(timeout=WAIT_S).state == "ready"
    client.close()
    health = client.health()
    assert (health.state, health.error) == ("dead", "the engine was closed")


def test_a_start_that_failed_is_dead_of_its_cause(folder):
    with EngineCoreClient(make_config(folder, executor=BrokenMultiproc)) as client:
        wait_until(lambda: client.health().state == "dead", "it lives")
        assert client.health().error == "tensor 'x' is missing"


@pytest.fixture
def silent(folder):
    """An engine whose process is stopped, and so says nothing."""
    with EngineCoreClient(make_config(folder)) as client:
        pid = client.ready.pids["engine"]
        os.kill(pid, signal.SIGSTOP)
        yield client
        os.kill(pid, signal.SIGCONT)
        assert client.health(timeout=WAIT_S).state == "ready"


def test_a_silent_engine_is_stalled_and_what_it_does_is_said(silent):
    started = time.monotonic()
    health = silent.health(timeout=0.2)
    assert time.monotonic() - started < WAIT_S
    assert health.state == "stalled"
    assert str(silent.ready.pids["engine"]) in health.error
    assert "stopped" in health.error


def test_no_call_waits_longer_for_a_silent_engine_than_it_was_told_to(silent, monkeypatch):
    monkeypatch.setattr("ringcore.front_end.client._REPLY_GRACE_S", 0.1)
    for _ in range(2):  # the first is cut off in its middle, the second waits behind it
        with pytest.raises(RpcTimeoutError):
            silent.collective_rpc("zeros", [np.zeros(20 << 20, np.uint8).data], timeout=0.1)
    assert silent.health(timeout=0.1).state == "stalled"


def test_closing_ends_a_thread_that_cannot_send(folder):
    client = EngineCoreClient(make_config(folder))
    pid = client.ready.pids["engine"]
    os.kill(pid, signal.SIGSTOP)
    raised: list = []

    def send():
        try:
            client.collective_rpc("zeros", [np.zeros(20 << 20, np.uint8).data])
        except EngineDeadError as error:
            raised.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    sending.join(0.2)
    os.kill(pid, signal.SIGCONT)
    client.close()
    sending.join(WAIT_S)
    assert [error.message for error in raised] == ["the engine was closed"]


def test_a_death_ends_a_thread_that_cannot_send(folder):
    with EngineCoreClient(make_config(folder)) as client:
        pid = client.ready.pids["engine"]
        os.kill(pid, signal.SIGSTOP)
        raised: list = []

        def send():
            try:
                client.collective_rpc("zeros", [np.zeros(20 << 20, np.uint8).data])
            except EngineDeadError as error:
                raised.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        sending.join(0.2)
        os.kill(pid, signal.SIGKILL)
        sending.join(WAIT_S)
        assert [error.details["signal"] for error in raised] == ["SIGKILL"]


@pytest.fixture
def own_folder(tmp_path):
    """For `KILLS_ONCE`, which leaves a mark in it."""
    return make_model_folder(tmp_path)


def test_an_engine_that_heals_puts_out_the_same_tokens(own_folder):
    prompts = {"killer": [KILLS_ONCE, 5], "other": [7, 8, 9], "third": [11]}
    with EngineCoreClient(make_config(own_folder, max_worker_restarts=1)) as client:
        before = client.ready
        client.add_requests([request(name, prompt, max_tokens=20) for name, prompt in prompts.items()])
        outputs = collect(client, prompts)
        for name, prompt in prompts.items():
            assert tokens(outputs, name) == expected(prompt, 20)
        after = client.ready
        assert after.pids["engine"] == before.pids["engine"]
        assert after.pids["worker 0"] != before.pids["worker 0"]
        assert not is_alive(before.pids["worker 0"])
        health = client.health(timeout=WAIT_S)
        assert (health.state, health.num_restarts) == ("ready", 1)
        assert "SIGKILL" in health.restart_cause
        assert client.collective_rpc("echo", ["x"]) == ["0:x"]


def test_a_call_under_which_the_worker_dies_says_so_and_the_next_is_served(own_folder):
    with EngineCoreClient(make_config(own_folder, max_worker_restarts=2)) as client:
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                client.collective_rpc("die")
            assert client.collective_rpc("echo", ["x"], timeout=60) == ["0:x"]
        with pytest.raises(EngineDeadError, match="max_worker_restarts"):
            client.collective_rpc("die")
        with pytest.raises(EngineDeadError, match="max_worker_restarts"):
            client.collective_rpc("echo", ["x"])
        assert client.health().state == "dead"


def test_an_idle_engine_notices_a_death_and_heals(own_folder):
    with EngineCoreClient(make_config(own_folder, max_worker_restarts=1)) as client:
        worker = client.ready.pids["worker 0"]
        os.kill(worker, signal.SIGKILL)
        states = set()
        wait_until(
            lambda: states.add(client.health(timeout=WAIT_S).state) or client.ready.pids["worker 0"] != worker, ""
        )
        assert states <= {"ready", "starting"}
        assert client.health(timeout=WAIT_S).num_restarts == 1


def test_closing_while_it_heals(own_folder):
    client = EngineCoreClient(make_config(own_folder, FragileMultiproc, max_worker_restarts=5))
    pids = client.ready.pids
    Path(own_folder, "holds").touch()
    os.kill(pids["worker 0"], signal.SIGKILL)
    wait_until(lambda: client.health().state == "starting", "it does not heal")
    assert "SIGKILL" in client.health().restart_cause
    client.close()
    assert not any(is_alive(pid) for pid in pids.values())


# ---------------------------------------------------------------------------------------------------------------
# What is left behind.


def named_sockets(pids):
    """The names of the Unix sockets that these processes have open."""
    targets = [os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    inodes = {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}
    assert inodes
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in inodes and len(row) > 7]


def test_no_file_is_ever_made(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for its processes
    made = tmp_path.stat().st_mtime_ns
    with EngineCoreClient(make_config(folder)) as client:
        client.add_requests([request("a", [4, 2])])
        collect(client, ["a"])
        (name,) = named_sockets(client.ready.pids.values())
        assert name.startswith("@ringcore/")  # an abstract one, in no directory
    assert tmp_path.stat().st_mtime_ns == made  # not even for a moment


def test_a_fork_of_the_client_leaves_the_engine_alone(shared):
    pid = os.fork()
    if pid == 0:
        shared._connection.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert shared.collective_rpc("echo", ["x"], timeout=WAIT_S) == ["0:x"]


def test_a_dropped_client_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for its processes

    def num_fds():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    fds, threads = num_fds(), threading.active_count()
    client = EngineCoreClient(make_config(folder))
    pids = client.ready.pids
    del client
    gc.collect()
    assert not any(is_alive(pid) for pid in pids.values())
    assert list(tmp_path.iterdir()) == []
    assert num_fds() == fds
    assert threading.active_count() == threads
