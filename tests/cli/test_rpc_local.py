"""`ringcore rpc` with an engine of this user on this host."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from admin_peers import NOBODY, WAIT_S, needs_root
from documented import commands

from ringcore.cli import main
from ringcore.cli.ps import ps
from ringcore.cli.rpc import rpc
from ringcore.front_end.local_engines import local_engines

ROOT = Path(__file__).parents[2]


def run(capsys, *args) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        main(["rpc", *map(str, args)])
    assert caught.value.code == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def fails(capsys, *args) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["rpc", *map(str, args)])
    (line,) = capsys.readouterr().err.splitlines()
    return caught.value.code, line


def test_by_pid_id_and_model(capsys, pid, folder):
    (engine_id,) = [one.engine_id for one in local_engines() if one.pid == pid]
    for name in (pid, engine_id, folder, Path(folder).name):
        assert run(capsys, name, "echo", "a") == ["rank 0: 0:a", "rank 1: 1:a"]


def test_the_command_as_typed(pid):
    """Of a process that imports neither torch nor ZeroMQ."""
    program = (
        "import sys, atexit; from ringcore.cli import main; "
        "atexit.register(lambda: print(sorted({'torch', 'zmq', 'transformers'} & {*sys.modules}))); main()"
    )
    command = [sys.executable, "-c", program, "rpc", str(pid), "stats"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, cwd=ROOT).stdout
    *lines, imported = out.splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1"]
    assert lines[1].split() == ["rank", "0", "1"]
    assert imported == "[]"


def test_the_workers_come_first_and_the_engine_where_it_alone_has_the_method(capsys, pid):
    assert [json.loads(line)["rank"] for line in run(capsys, pid, "stats", "--json")] == [0, 1]
    assert json.loads(run(capsys, pid, "stats", "--json", "--engine")[0])["num_running"] == 0
    assert run(capsys, pid, "is_sleeping") == ["false"]
    assert run(capsys, pid, "pause", "all") == ["done"]
    assert run(capsys, pid, "resume") == ["done"]
    assert run(capsys, pid, "nap", "0") == ["done on 2 ranks"]


def test_the_list(capsys, pid):
    lines = [" ".join(line.split()) for line in run(capsys, pid)]
    assert "engine read changes nothing stats() -> EngineStats The scheduler's counts." in lines
    assert "workers call changes workers or caches echo(value: str, times: int = 1) -> str" in lines


def test_an_engine_that_does_not_answer_is_explained(capsys, pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        code, line = fails(capsys, pid, "is_sleeping", "--timeout", "0.2")
        assert code == 1
        assert "no answer of the engine within 0.2 s; it is hung: the process is stopped; 'kill -CONT" in line
    finally:
        os.kill(pid, signal.SIGCONT)


def test_no_such_engine(capsys, pid):
    code, line = fails(capsys, "no-such-model", "stats")
    assert code == 2
    assert line.startswith(
        "ringcore: engine: 'no-such-model': no such engine; give a pid, the beginning of an id, or a "
    )
    assert f"{pid} (" in line


COMMANDS = commands("ps|rpc", "docs/guide/operators.md", "docs/guide/workers.md", texts=(ps.__doc__, rpc.__doc__))


def test_there_are_documented_commands():
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands(capsys, engine, pid, folder, keys, command, monkeypatch):
    if "--all" in command:  # nothing is called that another program runs
        ours = [one for one in local_engines() if one.pid == pid]
        monkeypatch.setattr("ringcore.front_end.local_engines.local_engines", lambda: ours)
    command = command.replace("SmolLM2-135M", Path(folder).name).replace("./admin-keys", keys)
    command = re.sub(r"\b4200\b", str(os.getpid()), command)
    command = re.sub(r"\b(4242|PID)\b", str(pid), command).replace("tcp://127.0.0.1:5600", engine.ready.admin_endpoint)
    program, *args = shlex.split(command)
    assert program == "ringcore"
    with pytest.raises(SystemExit) as caught:
        main(args)
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    assert out


# ---------------------------------------------------------------------------------------------------------------
# Another user.

# Runs each command as root, which also imports what it needs, and again as nobody: exit code, stdout, stderr.
TWICE = """
import contextlib, io, json, os, sys
from ringcore.cli import main

def outcome(words):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

commands = json.loads(sys.argv[1])
first = [outcome(words) for words in commands]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps([first, [outcome(words) for words in commands]]))
"""


@needs_root
def test_another_user_is_refused_by_every_command(pid, folder, tmp_path):
    engine_id = next(one.engine_id for one in local_engines() if one.pid == pid)
    dump = str(tmp_path / "state.json")
    calls = [["rpc", name] for name in (str(pid), engine_id, folder)]
    calls += [["rpc", str(pid), *words] for words in (["stats"], ["pause", "all"], ["resume"])]
    calls += [["top", str(pid), "--once", "--interval", "0.1"], ["top", str(pid), "--json"], ["dump", str(pid), dump]]
    command = [sys.executable, "-c", TWICE, json.dumps([["ps", "--json"], *calls])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    by_root, by_nobody = json.loads(done.stdout)
    assert [code for code, _, _ in by_root] == [0] * (1 + len(calls))
    assert str(pid) in by_root[0][1]
    assert by_nobody[0] == [0, "", ""]
    for code, shown, told in by_nobody[1:]:
        assert (code, shown) == (2, "")
        assert f"user {NOBODY} runs no engine in this network namespace" in told
