"""Engines of this user, found and called over their private sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from admin_peers import WAIT_S, local_name, needs_root, wait_until
from fake_engine import hurried, make_model_folder

from ringcore import AdminClient, EngineConfig, SamplingParams
from ringcore.engine_core.admin.listener import ADMIN_LIMITS
from ringcore.engine_core.admin.local_listener import LocalListener
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.errors import EngineDeadError, InvalidRequestError, PermissionDeniedError, RpcTimeoutError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.local_engines import LocalEngine, find_engine, find_engines, local_engines
from ringcore.protocol.engine_description import EngineDescription
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.protocol.scopes import SCOPES

TESTS = Path(__file__).parents[1]


def start(folder, **options) -> EngineCoreClient:
    options = {"executor": "fake_engine:FakeMultiproc"} | options
    return EngineCoreClient(EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=64, **options))


def found(pid: int) -> LocalEngine | None:
    return next((one for one in local_engines() if one.pid == pid), None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    # Names that no other run of these tests has: all engines of a user are seen.
    made = [tmp_path_factory.mktemp(name) / f"{name}-{os.getpid()}" for name in ("first", "second")]
    for folder in made:
        folder.mkdir()
    return [make_model_folder(folder) for folder in made]


@pytest.fixture(scope="module")
def engines(folders):
    with (
        start(folders[0], tensor_parallel_size=2) as first,
        start(folders[1], executor="fake_engine:FakeUniproc") as second,
    ):
        first.wait_ready()
        second.wait_ready()
        yield [first, second]


@pytest.fixture(scope="module")
def pids(engines):
    return [engine.ready.pids["engine"] for engine in engines]


# ---------------------------------------------------------------------------------------------------------------
# Finding.


def test_each_is_found_and_described(pids, folders):
    first, second = (found(pid) for pid in pids)
    assert first.description == EngineDescription(
        engine_id=first.engine_id,
        pid=pids[0],
        model=folders[0],
        executor="fake_engine:FakeMultiproc",
        device="auto",
        num_ranks=2,
        started_s=first.description.started_s,
        status_fd=first.description.status_fd,
        owner_pid=os.getpid(),
    )
    assert second.model == folders[1]
    assert first.engine_id != second.engine_id
    assert 0 < time.monotonic() - first.description.started_s < 600
    assert first.uid == os.geteuid()


@pytest.mark.parametrize("by", ["pid", "number", "id", "beginning of the id", "path", "name", "itself"])
def test_one_is_meant(pids, folders, by):
    engine = found(pids[1])
    wanted = {
        "pid": str(pids[1]),
        "number": pids[1],
        "id": engine.engine_id,
        "beginning of the id": engine.engine_id[:7],
        "path": folders[1] + "/",
        "name": Path(folders[1]).name,
        "itself": engine,
    }[by]
    with AdminClient.local(wanted) as admin:
        assert admin.collective_rpc("echo", ["a"]) == ["0:a"]
        assert [rank.pid for rank in admin.health().ranks] == [pids[1]]


def engine_of(pid: int, engine_id: str, model: str | None, uid: int | None = None, owner=None) -> LocalEngine:
    description = model and EngineDescription(engine_id, pid, model, "multiproc", "cpu", 1, 0.0, 5, owner_pid=owner)
    return LocalEngine(LocalName(os.geteuid() if uid is None else uid, pid, engine_id), pid, description or None)


ENGINES = [
    engine_of(10, "aaaa1111", "org/model"),
    engine_of(20, "aaaa2222", "/models/other", owner=60),
    engine_of(30, "bbbb3333", "/more/other", owner=60),
    engine_of(40, "20cc4444", None),
    engine_of(50, "dddd5555", "/models/theirs", uid=os.geteuid() + 1),
]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [("org/model", 0), ("model", 0), ("/more/other", 2), ("20", 1), ("20c", 3), ("bb", 2), (50, 4), ("dddd", 4)],
)
def test_which_one_is_meant(wanted, index):
    assert find_engine(wanted, ENGINES) is ENGINES[index]
    assert find_engines(wanted, ENGINES) == [ENGINES[index]]


@pytest.mark.parametrize(("wanted", "indices"), [("60", [1, 2]), (60, [1, 2]), ("other", [1, 2]), (None, [0, 1, 2, 3])])
def test_several_are_meant(wanted, indices):
    """Of one owner, of one model; none of another user."""
    assert find_engines(wanted, ENGINES) == [ENGINES[index] for index in indices]


@pytest.mark.parametrize(
    ("wanted", "among", "says"),
    [
        (None, ENGINES, r"^engine: 4 engines fit; give the pid of one: 10 \(aaaa1111, org/model\), 20 \(aaaa2222, /mo"),
        ("other", ENGINES, r"^engine: 'other': 2 engines fit; give the pid of one: 20 \(aaaa2222, .*, 30 \(bbbb3333, "),
        ("aaaa", ENGINES, r"^engine: 'aaaa': 2 engines fit; .*: 10 \(.*, 20 \("),
        (
            "nothing",
            ENGINES,
            r"^engine: 'nothing': no such engine; give a pid, .* of: 10 \(.* 40 \(20cc4444, model unk",
        ),
        ("60", ENGINES, r"^engine: '60': 2 engines fit; give the pid of one: 20 "),
        ("None", ENGINES, "no such engine"),
        ("theirs", ENGINES, r"no such engine; .* 50 \(dddd5555, /models/theirs of user \d+\)$"),
        ("", ENGINES, "no such engine"),
        (None, [], r"^engine: user \d+ runs no engine in this network namespace; look at 'ringcore ps', or give tcp"),
    ],
)
def test_an_error_names_those_that_could_be_meant(wanted, among, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        find_engine(wanted, among)
    assert caught.value.details["field"] == "engine"


def test_the_only_one_needs_no_name():
    assert find_engine(None, ENGINES[:1]) is ENGINES[0]
    assert find_engine(None, [ENGINES[1], ENGINES[4]]) is ENGINES[1]  # another user's is not meant by that


# ---------------------------------------------------------------------------------------------------------------
# Calling.


def test_every_scope_is_allowed(pids):
    with AdminClient.local(pids[0]) as admin:
        assert {method.scope for method in admin.methods()} == set(SCOPES)
        assert admin.collective_rpc("stats", unique_reply_rank=1)["rank"] == 1
        assert admin.collective_rpc("echo", ["b"]) == ["0:b", "1:b"]
        assert admin.call_engine("pause", ["all"]) is None
        assert admin.call_engine("resume") is None


def test_large_values_and_errors(pids):
    with AdminClient.local(pids[0]) as admin:
        assert admin.collective_rpc("zeros", [5 << 20]) == [bytes(5 << 20)] * 2
        with pytest.raises(InvalidRequestError, match="no worker method 'ecko'"):
            admin.collective_rpc("ecko")
        with pytest.raises(InvalidRequestError, match="above the limit of 67108864; send less per call"):
            admin.collective_rpc("echo", [bytes(65 << 20)])
        assert admin.stats().num_running == 0


def test_threads_and_clients_at_once(pids):
    answers = []

    def call(number: int) -> None:
        with AdminClient.local(pids[0]) as admin:
            answers.append((number, admin.collective_rpc("echo", [f"{number}"], unique_reply_rank=0)))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(answers) == [(number, f"0:{number}") for number in range(16)]


def test_a_read_only_call_is_answered_while_a_step_or_call_runs(engines, pids, folders):
    with AdminClient.local(pids[0]) as admin, AdminClient.local(pids[0]) as other:
        thread = threading.Thread(target=lambda: admin.collective_rpc("nap", [WAIT_S]))
        thread.start()
        wait_until(lambda: other.health().ranks[0].method == "nap")
        assert other.collective_rpc("stats", unique_reply_rank=0)["rank"] == 0
        assert thread.is_alive()
        with hurried(folders[0]):
            thread.join(WAIT_S)


def test_an_engine_that_never_polls_still_answers(engines, pids):
    """Its own process computes the steps, one after the other."""
    client = engines[1]
    client.add_requests([EngineCoreRequest("long", [5, 6], SamplingParams(max_tokens=60), arrival_s=0.0)])
    with AdminClient.local(pids[1]) as admin:
        answers = [admin.stats().step for _ in range(20)]
    assert answers == sorted(answers)
    while not any(one.finish_reason for one in client.get_outputs(timeout=WAIT_S).outputs):
        continue


def test_an_idle_engine_does_nothing(pids):
    with AdminClient.local(pids[0]) as admin:
        admin.health()
        process = psutil.Process(pids[0])
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        assert sum(process.cpu_times()[:2]) - before < 0.15


# ---------------------------------------------------------------------------------------------------------------
# Start and end.


def test_a_stopped_engine_is_found_and_its_calls_time_out(pids, folders, monkeypatch):
    monkeypatch.setattr("ringcore.front_end.admin_client._REPLY_GRACE_S", 0.0)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        assert found(pids[1]).model == folders[1]
        with AdminClient.local(pids[1]) as admin, pytest.raises(RpcTimeoutError, match="health: no answer"):
            admin.health(timeout=0.1)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    with AdminClient.local(pids[1]) as admin:
        assert admin.health().state == "ready"


def starting(folder) -> list[LocalEngine]:
    fragile = "fake_engine:FragileMultiproc"
    found = [one for one in local_engines() if one.model == folder]
    return [one for one in found if one.description.executor == fragile]


def test_an_engine_that_starts_is_found_and_answers_once_it_is_ready(folders):
    hold = Path(folders[0]) / "holds"
    hold.touch()
    try:
        with start(folders[0], executor="fake_engine:FragileMultiproc") as client:
            wait_until(lambda: starting(folders[0]))
            (engine,) = starting(folders[0])
            assert engine.status().num_calls == 0
            with AdminClient.local(engine) as admin:
                threading.Timer(0.2, hold.unlink).start()
                assert admin.health(timeout=WAIT_S).state == "ready"
            assert engine.status().num_calls > 0
            assert client.wait_ready().pids["engine"] == engine.pid
    finally:
        hold.unlink(missing_ok=True)


def listed(pid: int) -> bool:
    return f"@ringcore/{os.geteuid()}/{pid}/" in Path("/proc/net/unix").read_text()


def test_nothing_is_left_of_a_killed_engine_and_its_calls_end(folders):
    with start(folders[0]) as client:
        pid = client.ready.pids["engine"]
        assert listed(pid)
        with AdminClient.local(pid) as admin:
            outcome: list[EngineDeadError] = []

            def nap() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    admin.collective_rpc("nap", [30.0])
                outcome.append(caught.value)

            thread = threading.Thread(target=nap)
            thread.start()
            with AdminClient.local(pid) as other:
                wait_until(lambda: other.health().ranks[0].method == "nap")
            os.kill(pid, signal.SIGKILL)
            thread.join(WAIT_S)
            assert "closed the connection: it has ended" in str(outcome[0])
        # Its first thread can be a zombie while another still ends, and has its sockets.
        wait_until(lambda: not listed(pid))
        assert found(pid) is None
        with pytest.raises(InvalidRequestError, match=f"engine: '{pid}': "):
            AdminClient.local(pid)


def test_it_can_be_turned_off(folders):
    with start(folders[0], local_admin=False) as client:
        pid = client.ready.pids["engine"]
        assert not listed(pid)
        assert found(pid) is None


def test_an_engine_that_is_gone(engines):
    with pytest.raises(EngineDeadError, match="is not running: nothing listens there"):
        AdminClient.local(LocalEngine(local_name()))


# ---------------------------------------------------------------------------------------------------------------
# Other users.

AS_NOBODY = """
import os, sys
from ringcore import AdminClient
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.front_end.local_engines import LocalEngine, local_engines
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # afterwards it may not be able to read any module
print([one.uid for one in local_engines()])
try:
    AdminClient.local(LocalEngine(LocalName.parse(sys.argv[1])))
except PermissionError as error:
    print(error)
"""


@needs_root
def test_another_user_sees_no_engine_and_gets_in_nowhere(pids):
    name = str(found(pids[0]).name)
    command = [sys.executable, "-c", AS_NOBODY, name]
    out = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=TESTS.parent, check=True).stdout
    assert out == f"[]\nthe engine {pids[0]} belongs to user 0, and this process to user 65534; call as 0\n"


IMPOSTOR = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sockets = []
for name in sys.argv[1:]:
    sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sockets[-1].bind(b"\\0" + name.replace("PID", str(os.getpid())).encode())
    sockets[-1].listen()
print("listens", flush=True)
sys.stdin.read()
"""


@needs_root
def test_a_name_that_another_user_took_deceives_nobody(pids):
    mine = local_name()
    forged = f"{os.getpid():08x}"
    lines = f"x\n0: 0 0 00010000 0001 01 1 @ringcore/0/1/{forged}"
    names = [str(mine), "ringcore/0/PID/bbbbbbbb", lines]
    command = [sys.executable, "-c", IMPOSTOR, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "listens\n"
        listed = Path("/proc/net/unix").read_text()
        assert f"@ringcore/0/1/{forged}" in listed
        assert {one.pid for one in local_engines()} >= set(pids)
        assert not {forged, "bbbbbbbb", mine.engine_id} & {one.engine_id for one in local_engines()}
        with pytest.raises(PermissionDeniedError, match="belongs to user 65534, and not to the engine of user 0"):
            AdminClient.local(LocalEngine(mine))
    finally:
        process.communicate(timeout=WAIT_S)


@needs_root
def test_an_engine_of_another_pid_namespace_is_found_without_its_process():
    """Its socket is here, /proc has no such process or another."""
    name = LocalName(0, 1, local_name().engine_id)  # pid 1 has no such socket
    listener = LocalListener(name, ADMIN_LIMITS)
    try:
        (engine,) = [one for one in local_engines() if one.engine_id == name.engine_id]
        assert engine == LocalEngine(name, os.getpid(), None)  # the kernel knows who listens
        assert engine.status() is None
        assert str(engine) == f"1 ({name.engine_id}, model unknown)"
    finally:
        listener.close()
