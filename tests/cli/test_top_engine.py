"""`ringcore top` and `ringcore dump` with a real engine process over its private socket."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from admin_peers import WAIT_S, wait_until
from documented import commands
from fake_engine import SLOW

from ringcore import LLM, AdminClient, SamplingParams
from ringcore.cli import dump as dump_module
from ringcore.cli import main
from ringcore.cli.dump import dump
from ringcore.cli.engines import choose_engine
from ringcore.cli.top import source as source_module
from ringcore.cli.top.app import TopApp
from ringcore.cli.top.command import top
from ringcore.cli.top.dialogs import EngineList
from ringcore.cli.top.monitor import Monitor
from ringcore.cli.top.source import Action, AdminSource, Choice
from ringcore.errors import RpcTimeoutError
from ringcore.protocol.requests import EngineCoreRequest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(pid):
    made = AdminSource(choose_engine(str(pid), None))
    yield made
    made.close()


@pytest.fixture
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def add(engine, request_id: str) -> None:
    """A request that takes seconds."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    engine.add_requests([EngineCoreRequest(request_id, [SLOW, 1, 2], params, arrival_s=time.monotonic())])


def end_of(engine, request_id: str):
    while True:
        for output in engine.get_outputs(timeout=WAIT_S).outputs:
            if output.request_id == request_id and output.finish_reason is not None:
                return output


def num_blocks(sample) -> int:
    return sum(one.num_blocks for one in sample.engine.requests.oldest)


def test_a_sample_and_the_end_of_a_request(engine, source):
    add(engine, "slow")
    wait_until(lambda: source.sample().engine.num_generated_tokens >= 3)
    samples = []  # of which one has the request and its blocks at once
    wait_until(lambda: samples.append(source.sample()) or num_blocks(samples[-1]) == samples[-1].engine.blocks.num_used)
    sample = samples[-1]
    (request,) = sample.engine.requests.oldest
    assert (request.request_id, request.state, request.num_prompt_tokens) == ("slow", "running", 3)
    assert sample.engine.requests.num_by_state["running"] == sample.engine.health.num_running == 1
    assert request.num_blocks >= 1
    assert sample.engine.steps.parts["wait"].p50_s > 0.04  # a step of such a request takes 50 ms
    assert sample.engine.steps.parts["send"].p50_s < 0.04
    assert [worker.usage["rank"] for worker in sample.workers] == [0, 1]
    assert source.act(Action("abort", (["slow"],))) == ["slow"]
    assert (end_of(engine, "slow").finish_reason, source.act(Action("abort", (["slow"],)))) == ("abort", [])
    assert source.sample().engine.requests.oldest == []


def test_the_reader_of_an_aborted_request_is_told(folder):
    """By `LLM`, which did not ask for it."""
    options = {"executor": "fake_engine:FakeUniproc", "load_format": "dummy", "max_model_len": 256}
    with LLM(folder, **options) as llm:
        outputs = []
        prompt = {"prompt_token_ids": [SLOW, 1, 2]}
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate([prompt], params)), daemon=True)
        thread.start()
        with AdminClient.local(llm.ready.pids["engine"]) as admin:
            wait_until(lambda: admin.call_engine("requests")["num_by_state"]["running"] == 1)
            (request,) = admin.call_engine("requests")["oldest"]
            assert admin.call_engine("abort", [request["request_id"]]) == [request["request_id"]]
        thread.join(WAIT_S)
        (output,) = outputs
        assert (output.outputs[0].finish_reason, output.error) == ("abort", None)
        assert len(output.outputs[0].token_ids) < 200


def test_pause_and_resume(engine, source):
    assert source.act(Action("pause", ("new",))) is None
    try:
        assert source.sample().engine.health.paused == "new"
        add(engine, "waits")
        wait_until(lambda: source.sample().engine.requests.num_by_state["waiting"] == 1)
        source.act(Action("abort", (["waits"],)))
        assert end_of(engine, "waits").finish_reason == "abort"
    finally:
        source.act(Action("resume"))
    assert source.sample().engine.health.paused is None


def test_an_engine_that_is_stopped_is_silent_and_says_why(monkeypatch, source, stopped):
    monkeypatch.setattr(source_module, "_ANSWER_S", 0.2)
    with pytest.raises(RpcTimeoutError, match="the process is stopped; 'kill -CONT"):
        source.sample()


def test_a_monitor_survives_a_restart_of_the_workers(engine, pid):
    monitor = Monitor(Choice("x", "", lambda: AdminSource(choose_engine(str(pid), None))))
    assert monitor.poll().sample.engine.health.num_restarts == 0
    os.kill(monitor.view.sample.engine.about.pids["worker 1"], signal.SIGKILL)
    wait_until(lambda: (view := monitor.poll()).contact == "live" and view.sample.engine.health.num_restarts == 1)
    wait_until(lambda: len(monitor.poll().sample.workers) == 2)
    monitor.close()


# ---------------------------------------------------------------------------------------------------------------
# Dumps.


def test_a_dump_has_it_all(engine, pid, tmp_path):
    add(engine, "dumped")
    path = dump_module.write_dump(choose_engine(str(pid), None), tmp_path / "state.json")
    engine.abort(["dumped"])
    assert end_of(engine, "dumped").finish_reason == "abort"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = json.loads(path.read_text())
    assert list(found["errors"]) == ["workers_memory"]  # which these workers do not have
    assert found["snapshot"]["requests"]["oldest"][0]["request_id"] == "dumped"
    assert len(found["snapshot"]["steps"]["last"]["wait_s"]) == found["snapshot"]["steps"]["num_steps"] > 0
    assert "_call_engine" in found["stack"]
    assert len(found["workers_stack"]) == len(found["workers_stats"]) == 2
    of_engine, *of_workers = found["processes"]
    assert (of_engine["pid"], len(of_workers)) == (pid, 2)
    assert "loop.py" in of_engine["stacks"]
    assert all("worker_proc.py" in one["stacks"] for one in of_workers)


def test_a_dump_of_an_engine_that_does_not_answer(monkeypatch, pid, tmp_path, stopped):
    monkeypatch.setattr(dump_module, "_CALL_S", 0.2)
    found = json.loads(dump_module.write_dump(choose_engine(str(pid), None), tmp_path / "s.json").read_text())
    assert "no answer" in found["errors"]["snapshot"]
    of_engine, *of_workers = found["processes"]
    assert (of_engine["status"], of_engine["stacks"]) == ("stopped", "stopped: no stack")
    assert all("worker_proc.py" in one["stacks"] for one in of_workers)


# ---------------------------------------------------------------------------------------------------------------
# Commands.


def fails(capsys, *args) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, args)))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_wrong_commands(capsys, pid):
    assert "interval=0.0: give 0.1 to 3600 s" in fails(capsys, "top", pid, "--interval", "0")
    assert "give one of --once and --json" in fails(capsys, "top", pid, "--once", "--json")
    assert "give the keys of tcp://127.0.0.1:1 as --keys" in fails(capsys, "top", "tcp://127.0.0.1:1", "--once")
    assert "only tcp://HOST:PORT needs keys" in fails(capsys, "dump", pid, "--keys", "x")
    assert "no such engine" in fails(capsys, "dump", "no-such-engine")


def test_without_textual(capsys, monkeypatch, pid):
    monkeypatch.setitem(sys.modules, "ringcore.cli.top.app", None)
    assert "pip install 'ringcore[cli]', or give --once" in fails(capsys, "top", pid)


def test_the_live_view_in_a_terminal(pid):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ringcore.cli", "top", str(pid)]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment) as program:
        os.close(theirs)
        try:
            seen = _seen_until(ours, lambda seen: b"Slowest requests" in seen and b"worker 1" in seen)
            os.write(ours, b"q")
            _seen_until(ours, lambda seen: False)
            assert program.wait(WAIT_S) == 0, seen
        finally:
            program.kill()
            os.close(ours)


def _seen_until(terminal: int, is_enough) -> bytes:
    """What is written to a terminal, until it is enough or the program has closed it."""
    seen, deadline = b"", time.monotonic() + WAIT_S
    while not is_enough(seen):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:  # the program has ended
                break
    return seen


COMMANDS = commands("top|dump", "docs/guide/operators.md", texts=(top.__doc__, dump.__doc__))


def test_there_are_documented_commands():
    assert len(COMMANDS) >= 9


@pytest.fixture
def headless(monkeypatch):
    """The live view without a terminal; it is quit once it shows an engine, or the list of them."""
    run, seen = TopApp.run, []

    async def quit_when_shown(pilot) -> None:
        for _ in range(1000):
            await pilot.pause(0.01)
            if isinstance(pilot.app.screen, EngineList):
                await pilot.press("escape")
                break
            if pilot.app._monitor is not None and pilot.app._monitor.view.contact == "live":
                break
        else:
            raise AssertionError("nothing is shown")
        seen.append(pilot.app)
        await pilot.press("q")

    monkeypatch.setattr(TopApp, "run", lambda app: run(app, headless=True, auto_pilot=quit_when_shown))
    return seen


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands(capsys, monkeypatch, tmp_path, headless, engine, pid, folder, keys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "get_terminal_size", lambda *args: os.terminal_size((100, 40)))
    command = command.replace("SmolLM2-135M", Path(folder).name).replace("./admin-keys", keys)
    command = command.replace("4242", str(pid)).replace("tcp://127.0.0.1:5600", engine.ready.admin_endpoint)
    program, name, *args = shlex.split(command)
    assert program == "ringcore"
    with pytest.raises(SystemExit) as caught:
        main([name, *args])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    match name, args:
        case "top", [*_, "--once"]:
            assert "Slowest requests" not in out
            assert "KV cache blocks" in out
        case "top", [*_, "--json"]:
            assert json.loads(out)["engine"]["about"]["pids"]["engine"] == pid
        case "top", _:
            assert len(headless) == 1
        case _:
            assert "snapshot" in json.loads((tmp_path / out.strip()).read_text())
