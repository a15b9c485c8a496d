"""`ringcore ps`, of engines that answer and of those that do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from admin_peers import WAIT_S, wait_until
from fake_engine import hurried, make_model_folder
from typer.testing import CliRunner

from ringcore import AdminClient, EngineConfig, SamplingParams
from ringcore.cli.app import make_app
from ringcore.cli.ps import in_words
from ringcore.cli.tables import age, table
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.engine_survey import EngineReport, survey
from ringcore.front_end.local_engines import LocalEngine, local_engines
from ringcore.protocol.requests import EngineCoreRequest

ROOT = Path(__file__).parents[2]


def start(folder, **options) -> EngineCoreClient:
    options = {"executor": "fake_engine:FakeMultiproc"} | options
    return EngineCoreClient(EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=64, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("models") / "tiny").mkdir()
    return make_model_folder(folder)


@pytest.fixture(scope="module")
def engines(folder):
    with start(folder, tensor_parallel_size=2) as first, start(folder, executor="fake_engine:FakeUniproc") as second:
        first.wait_ready()
        second.wait_ready()
        yield [first, second]


@pytest.fixture(scope="module")
def pids(engines):
    return [engine.ready.pids["engine"] for engine in engines]


def listed(*flags) -> dict[int, dict]:
    result = CliRunner().invoke(make_app(["ps"]), ["ps", "--json", *flags], catch_exceptions=False)
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {row["pid"]: row for row in rows}


def test_the_command_as_typed(pids, folder):
    command = [sys.executable, "-m", "ringcore.cli", "ps"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, cwd=ROOT).stdout
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    header = ["PID", "OWNER", "ID", "MODEL", "STATE", "AGE", "RUNNING", "WAITING", "TOKENS/S", "KV", "RANKS"]
    assert lines["PID"][:11] == header
    assert lines[str(pids[0])][1] == str(os.getpid())
    assert lines[str(pids[0])][3:5] == [folder, "ready"]
    assert lines[str(pids[0])][6:12] == ["0", "0", "0", "0%", "2", "cpu"]


def test_what_is_known_of_each(pids, folder):
    rows = listed()
    first = rows[pids[0]]
    assert 0 < first.pop("age_s") < 600
    assert len(first.pop("engine_id")) == 8
    assert first == {
        "pid": pids[0],
        "owner_pid": os.getpid(),
        "uid": os.geteuid(),
        "state": "ready",
        "detail": None,
        "model": folder,
        "executor": "fake_engine:FakeMultiproc",
        "num_ranks": 2,
        "devices": ["cpu", "cpu"],
        "num_running": 0,
        "num_waiting": 0,
        "generated_tokens_per_s": 0.0,
        "kv_cache_use": 0.0,
        "admin_endpoint": None,
    }
    assert rows[pids[1]]["state"] == "ready"


def test_the_load_of_an_engine_that_generates(engines, pids):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engines[0].add_requests([EngineCoreRequest("a", [1, 2, 3], params, arrival_s=time.monotonic())])
    while not any(one.finish_reason for one in engines[0].get_outputs(timeout=WAIT_S).outputs):
        continue
    assert listed()[pids[0]]["generated_tokens_per_s"] == pytest.approx(2.0)  # 20 in the last 10 s
    assert listed()[pids[1]]["generated_tokens_per_s"] == 0.0


def test_a_paused_and_a_sleeping_engine(pids):
    with AdminClient.local(pids[0]) as admin:
        with ExitStack() as again:
            admin.call_engine("pause", ["all"])
            again.callback(admin.call_engine, "resume")
            row = listed()[pids[0]]
            assert (row["state"], row["detail"]) == ("paused", "no step starts until 'ringcore rpc PID resume'")
        with ExitStack() as again:
            admin.call_engine("sleep", [0])
            again.callback(admin.call_engine, "wake_up")
            assert listed()[pids[0]]["state"] == "sleeping"
        assert listed()[pids[0]]["state"] == "ready"


def surveyed_in_s(stopped: LocalEngine) -> float:
    began = time.monotonic()
    assert [report.state for report in survey([stopped] * 10, 0.4)] == ["hung"] * 10
    return time.monotonic() - began


def test_a_stopped_engine_delays_no_other(pids):
    os.kill(pids[0], signal.SIGSTOP)
    try:
        found = []  # on a busy machine the other one may need longer than that
        wait_until(lambda: found.append(listed("--timeout", "0.4")) or found[-1][pids[1]]["state"] == "ready")
        rows = found[-1]
        assert rows[pids[0]]["state"] == "hung"
        assert rows[pids[0]]["detail"] == f"the process is stopped; 'kill -CONT {pids[0]}' has it go on"
        assert rows[pids[0]]["num_running"] is None
        assert rows[pids[0]]["num_ranks"] == 2
        (engine,) = [one for one in local_engines() if one.pid == pids[0]]
        assert any(surveyed_in_s(engine) < 3 for _ in range(5))  # and not 10 times as long as one
    finally:
        os.kill(pids[0], signal.SIGCONT)
    wait_until(lambda: listed("--timeout", "5")[pids[0]]["state"] == "ready")


def test_an_engine_whose_own_process_computes_a_long_step_is_busy(pids, folder):
    with AdminClient.local(pids[1]) as admin:
        thread = threading.Thread(target=lambda: admin.collective_rpc("nap", [WAIT_S]))
        thread.start()
        wait_until(lambda: listed("--timeout", "0.3")[pids[1]]["state"] == "busy")
        with hurried(folder):
            thread.join(WAIT_S)


def test_an_engine_that_starts(folder):
    hold, starting = Path(folder) / "holds", "fake_engine:FragileMultiproc"
    hold.touch()
    try:
        with start(folder, executor=starting) as client:
            wait_until(lambda: sum(one.model == folder for one in local_engines()) == 3)
            rows = listed("--timeout", "0.3").values()
            (row,) = [row for row in rows if (row["model"], row["executor"]) == (folder, starting)]
            assert (row["state"], row["detail"]) == ("starting", "its workers are not ready yet")
            hold.unlink()
            client.wait_ready()
            assert listed()[row["pid"]]["state"] == "ready"
    finally:
        hold.unlink(missing_ok=True)


def test_an_engine_that_is_gone_meanwhile():
    (report,) = survey([LocalEngine(LocalName(os.geteuid(), 4_000_000, "00000000"))], 1.0)
    assert (report.state, report.pid, report.model) == ("dead", 4_000_000, None)
    assert "nothing listens there" in report.detail


def test_no_engine(monkeypatch):
    monkeypatch.setattr("ringcore.front_end.local_engines.local_engines", list)
    result = CliRunner().invoke(make_app(["ps"]), ["ps"], catch_exceptions=False)
    assert result.stdout == f"user {os.geteuid()} runs no engine in this network namespace\n"
    assert CliRunner().invoke(make_app(["ps"]), ["ps", "--json"], catch_exceptions=False).stdout == ""


REPORTS = [
    EngineReport(
        pid=4242, owner_pid=4200, engine_id="0a1b2c3d", uid=1000, state="ready", model="org/model", age_s=754.2,
        num_ranks=2, devices=["cuda:0", "cuda:1"], num_running=12, num_waiting=3, generated_tokens_per_s=6120.4,
        kv_cache_use=0.4189,
    ),
    EngineReport(pid=77, engine_id="ffffffff", uid=1000, state="hung", detail="it\x1b[31m hangs", model="a\nb"),
]  # fmt: skip


def test_the_table():
    assert in_words(REPORTS, 1000) == [
        "PID   OWNER  ID        MODEL      STATE  AGE     RUNNING  WAITING  TOKENS/S  KV   RANKS",
        "4242  4200   0a1b2c3d  org/model  ready  12m34s  12       3        6,120     42%  2 cuda:0 cuda:1",
        "77    -      ffffffff  a?b        hung   ?       -        -        -         -    -",
        "77 is hung: it?[31m hangs",
    ]
    assert [line.split()[-1] for line in in_words(REPORTS, 0)[:3]] == ["USER", "1000", "1000"]


def test_durations():
    assert [age(s) for s in (0.44, 9.96, 59.4, 59.6, 3599, 3600, 86_399, 86_400, 1e6)] == [
        "0.4s", "10s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "11d13h",
    ]  # fmt: skip
    assert table(["A"], []) == ["A"]
