"""`ringcore rpc --all` and `--of`: one call to the engines of a service, or to all."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.cli import main
from ringcore.cli.engine_call import EngineCall
from ringcore.cli.several_engines import EngineAnswer, call_each, check_answers
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.errors import InvalidRequestError, RingcoreError, RpcTimeoutError
from ringcore.front_end import local_engines
from ringcore.front_end.client import EngineCoreClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("models") / f"replicated-{os.getpid()}").mkdir()
    return make_model_folder(folder)


@pytest.fixture(scope="module")
def pids(folder):
    """Of two engines of one owner, which is this process: one with two ranks, the other in its own process."""

    def start(**options) -> EngineCoreClient:
        options |= {"load_format": "dummy", "max_model_len": 64}
        return EngineCoreClient(EngineConfig.from_options(model=folder, **options))

    with start(executor="fake_engine:FakeMultiproc", tensor_parallel_size=2) as first:
        pids = [first.wait_ready().pids["engine"]]  # engines are listed in the order of their pids
        with start(executor="fake_engine:FakeUniproc") as second:
            yield [*pids, second.wait_ready().pids["engine"]]


@pytest.fixture(autouse=True)
def ours_alone(monkeypatch, folder):
    """No engine is called that another test or program runs, even one of this process."""
    find = local_engines.local_engines
    monkeypatch.setattr(local_engines, "local_engines", lambda: [one for one in find() if one.model == folder])


def run(capsys, *args, code: int = 0) -> tuple[list[str], str]:
    with pytest.raises(SystemExit) as caught:
        main(["rpc", *map(str, args)])
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    return out.splitlines(), err


def test_the_engines_of_a_service(capsys, pids, folder):
    """By the pid of the process that started them, or by their model: a line of each, and what its ranks answer."""
    for of in (os.getpid(), Path(folder).name):
        lines, _ = run(capsys, "--of", of, "echo", "a", 2)
        assert [line.split()[0] for line in lines if line[0] != " "] == [str(pid) for pid in pids]
        assert [line for line in lines if line[0] == " "] == ["  rank 0: 0:aa", "  rank 1: 1:aa", "  rank 0: 0:aa"]


def test_for_machines(capsys, pids):
    lines, _ = run(capsys, "--of", os.getpid(), "echo", "a", "--json")
    ids = {one.pid: one.engine_id for one in local_engines.find_engines(os.getpid())}
    assert [json.loads(line) for line in lines] == [
        {"pid": pid, "engine_id": ids[pid], "rank": rank, "value": f"{rank}:a"}
        for pid, rank in [(pids[0], 0), (pids[0], 1), (pids[1], 0)]
    ]
    lines, _ = run(capsys, "--of", os.getpid(), "is_sleeping", "--json")  # the engines' own
    assert [json.loads(line)["rank"] for line in lines] == [None, None]
    lines, _ = run(capsys, "--of", os.getpid(), "echo", "a", "--json", "--rank", 0)
    assert [json.loads(line)["value"] for line in lines] == ["0:a", "0:a"]


def test_all_of_this_user(capsys, pids, monkeypatch):
    found = local_engines.find_engines(os.getpid())
    theirs = local_engines.LocalEngine(LocalName(os.geteuid() + 1, 1, "0a1b2c3d"), 1)
    monkeypatch.setattr(local_engines, "local_engines", lambda: [*found, theirs])
    lines, _ = run(capsys, "--all", "pause", "all")
    assert [line for line in lines if line[0] == " "] == ["  done", "  done"]
    run(capsys, "--all", "resume")
    monkeypatch.setattr(local_engines, "local_engines", list)
    _, err = run(capsys, "--all", "stats", code=2)
    assert "runs no engine in this network namespace" in err


def test_one_that_does_not_answer_hides_no_other(capsys, pids):
    os.kill(pids[0], signal.SIGSTOP)
    try:
        lines, err = run(capsys, "--of", os.getpid(), "is_sleeping", "--timeout", "3", code=1)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert lines[1].startswith("  failed: ")
    assert "it is hung: the process is stopped" in lines[1]
    assert lines[3] == "  false"
    assert err.startswith("ringcore: 1 of 2 engines failed: ")


def test_errors_of_the_command(capsys, pids):
    _, err = run(capsys, "--of", "no-such-model", "stats", code=2)
    assert "'no-such-model': no such engine; give a pid" in err
    _, err = run(capsys, "--of", os.getpid(), "stats", "--keys", "keys", code=2)
    assert "engines of this host need none" in err
    _, err = run(capsys, os.getpid(), "stats", code=2)  # of one engine, which is not said
    assert "2 engines fit; give the pid of one" in err


class Engine(local_engines.LocalEngine):
    """Nothing listens at its name."""


def test_they_are_asked_at_once(monkeypatch):
    """Each waits for the other, which a call after the other could not."""
    together = threading.Barrier(3, timeout=60)

    class Client:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def collective_rpc(self, method, args, kwargs, timeout_s, rank):
            together.wait()
            return [[method, *args]]

    monkeypatch.setattr("ringcore.cli.several_engines.AdminClient.local", lambda engine: Client())
    engines = [Engine(LocalName(0, pid, f"{pid:08x}"), pid) for pid in (11, 12, 13)]
    answers = list(call_each(EngineCall("nap", ["3"], 5.0), engines))
    assert [one.engine.pid for one in answers] == [11, 12, 13]
    assert [one.values for one in answers] == [{0: ["nap", 3]}] * 3


def test_an_error_in_place_of_values():
    answer = EngineAnswer(Engine(LocalName(os.geteuid(), 11, "0000000b"), 11), {}, RpcTimeoutError("late\x1b[31m"))
    assert answer.in_words() == ["11 (0000000b, model unknown)", "  failed: late?[31m"]
    (line,) = answer.as_json()
    error = {"type": "RpcTimeoutError", "message": "late\x1b[31m"}
    assert json.loads(line) == {"pid": 11, "engine_id": "0000000b", "error": error}


def test_the_error_of_the_only_engine_is_itself():
    engine, error = Engine(LocalName(0, 11, "0000000b"), 11), InvalidRequestError("no", field="x", value=None)
    with pytest.raises(InvalidRequestError):
        check_answers([EngineAnswer(engine, {}, error)])
    with pytest.raises(RingcoreError, match="2 of 2 engines failed: late") as caught:
        check_answers([EngineAnswer(engine, {}, RpcTimeoutError("late")), EngineAnswer(engine, {}, error)])
    assert type(caught.value) is RingcoreError
    check_answers([EngineAnswer(engine, {None: 1})])
