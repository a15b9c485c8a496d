"""`ringcore rpc` and `ringcore keys`."""

from __future__ import annotations

import json
import stat

import pytest
from admin_peers import EchoEngine
from documented import commands
from typer.testing import CliRunner

from ringcore.cli import main
from ringcore.cli.app import make_app
from ringcore.cli.call_values import as_json, in_words
from ringcore.config.admin_keys import create_keys, read_client_keys, read_server_keys
from ringcore.protocol.host_tensor import HostTensor


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return str(create_keys(tmp_path_factory.mktemp("admin") / "keys"))


@pytest.fixture(scope="module")
def engine(keys):
    with EchoEngine(keys) as made:
        made.release.set()
        yield made


def invoke(*args):
    return CliRunner().invoke(make_app(args), list(args), catch_exceptions=False)


def fails(capsys, *args) -> tuple[int, str]:
    """The exit code and the one line of the error."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    (line,) = capsys.readouterr().err.splitlines()
    return caught.value.code, line


def test_a_line_of_json_a_rank(engine, keys):
    result = invoke("rpc", engine.address, "echo", "--json", "--keys", keys)
    assert result.exit_code == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [[0, [], {}], [1, [], {}]]


def test_arguments_are_json_or_else_strings(engine, keys):
    given = ["word", "3", "1.5", "null", "true", '"3"', '{"a": [1]}', "[1", "", "a b", "--", "-1"]
    result = invoke("rpc", engine.address, "echo", "--json", "--keys", keys, "--rank", "1", *given)
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == [1, ["word", 3, 1.5, None, True, "3", {"a": [1]}, "[1", "", "a b", -1], {}]


def test_the_timeout_reaches_the_engine(engine, keys):
    assert invoke("rpc", engine.address, "echo", "--keys", keys, "--timeout", "7").exit_code == 0
    assert 6 < engine.calls[-1].timeout_s <= 7


@pytest.mark.parametrize("flags", [[], ["--engine"]])
def test_a_call_of_the_engine_itself(engine, keys, flags):
    """Its workers have no such method: the flag is not needed."""
    result = invoke("rpc", engine.address, "pause", "all", *flags, "--keys", keys)
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert (engine.calls[-1].target, engine.calls[-1].method) == ("engine", "pause")
    assert invoke("rpc", engine.address, "pause", "all", *flags, "--json", "--keys", keys).stdout == "null\n"


def test_the_list_of_methods(engine, keys):
    result = invoke("rpc", engine.address, "--keys", keys)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "OF SCOPE EFFECT METHOD"
    assert "workers call changes workers or caches fail() -> None Raises an error of rank 1." in lines
    assert "workers read changes nothing look() -> object" in lines
    pause = "engine lifecycle stops serving, or changes the model pause(mode: PauseMode = 'new') -> None "
    assert any(line.startswith(pause) for line in lines)
    assert not any("shutdown" in line for line in lines)


def test_the_list_of_methods_for_machines(engine, keys):
    lines = invoke("rpc", engine.address, "--json", "--keys", keys).stdout.splitlines()
    methods = {(row["target"], row["name"]): row for row in map(json.loads, lines)}
    assert methods["workers", "look"]["scope"] == "read"
    assert methods["engine", "pause"]["signature"] == "(mode: PauseMode = 'new') -> None"


WORDS = [
    ({0: None, 1: None}, ["done on 2 ranks"]),
    ({1: None}, ["done on 1 rank"]),
    ({None: None}, ["done"]),
    ({None: True}, ["true"]),
    ({0: "a", 1: "b\x1bc"}, ["rank 0: a", "rank 1: b?c"]),
    ({0: "a\n  b\n", 1: 3}, ["rank 0:", "a", "  b", "rank 1: 3"]),
    (
        {0: {"a": 1, "b": {"c": "x", "d": []}}, 1: {"a": 20, "e": {}}},
        ["     rank 0  rank 1", "a    1       20", "b.c  x       -", "b.d  []      -", "e    -       {}"],
    ),
    ({None: {"name": "v" * 100}}, ["      value", "name  " + "v" * 57 + "..."]),
    ({None: [{"a": 1}, {"a": 2}]}, ['{"a":1}', '{"a":2}']),
    ({0: {}, 1: {"a": 1}}, ["rank 0: {}", 'rank 1: {"a":1}']),
]


@pytest.mark.parametrize(("values", "lines"), WORDS)
def test_values_in_words(values, lines):
    assert in_words(values) == lines


def test_arrays_and_tensors_are_lists():
    import numpy as np

    value = {"a": np.eye(2, dtype=np.int8), "t": HostTensor("float32", (2,), bytes(8)), "c": np.array([1 + 2j])}
    got = json.loads(as_json(value))
    assert got == {"a": [[1, 0], [0, 1]], "t": [0.0, 0.0], "c": [[1.0, 2.0]]}


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["fail"], 1, "KeyError: 'x'"),
        (["shutdown"], 2, "method='shutdown': only the engine itself calls it on its workers; close its owner (LLM, "),
        (["--rank", "0"], 2, "rank=0: only calls to workers have one; leave it out"),
        (["pause", "--engine", "--rank", "0"], 2, "rank=0: only calls to workers have one; leave it out"),
        (["echo", "--timeout", "-1"], 2, "timeout=-1.0: give seconds"),
        (["echo", "--keys", "/no/such/directory"], 2, "keys='/no/such/directory': no such directory"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, engine, keys, flags, code, says):
    keys_flag = [] if "--keys" in flags else ["--keys", keys]
    got, line = fails(capsys, "rpc", engine.address, *flags, *keys_flag)
    assert got == code
    assert line.startswith("ringcore: ")
    assert says in line


def test_no_engine_there(capsys, keys):
    code, line = fails(capsys, "rpc", "tcp://127.0.0.1:1", "stats", "--keys", keys)
    assert code == 1
    assert "nothing listens at this address" in line


def test_keys_are_for_tcp_and_tcp_needs_them(capsys, engine, keys):
    code, line = fails(capsys, "rpc", "4242", "stats", "--keys", keys)
    assert (code, "only tcp://HOST:PORT needs keys" in line) == (2, True)
    code, line = fails(capsys, "rpc", engine.address, "stats")
    assert (code, "keys: give the keys of tcp://" in line) == (2, True)


def test_keys_that_work(tmp_path):
    directory = tmp_path / "keys"
    result = invoke("keys", str(directory))
    assert result.exit_code == 0
    for file in ("server.key", "client.key_secret", "server.key_secret"):
        assert file in result.stdout
        assert stat.S_IMODE((directory / file).stat().st_mode) == 0o600
    assert read_client_keys(directory).public in read_server_keys(directory).clients


@pytest.mark.parametrize(
    ("flags", "scopes"),
    [
        ([], {"read", "call", "lifecycle"}),
        (["--scope", "read"], {"read"}),
        (["--scope", "call", "--scope", "read"], {"read", "call"}),
    ],
)
def test_the_scopes_of_new_keys(tmp_path, flags, scopes):
    assert invoke("keys", str(tmp_path / "keys"), *flags).exit_code == 0
    (client,) = read_server_keys(tmp_path / "keys").clients.values()
    assert client.scopes == scopes


def test_a_scope_that_is_none(capsys, tmp_path):
    code, line = fails(capsys, "keys", str(tmp_path / "keys"), "--scope", "admin")
    assert (code, "scope='admin': give of read, call, lifecycle" in line) == (2, True)
    assert not (tmp_path / "keys").exists()


def test_keys_are_not_overwritten(capsys, keys):
    code, line = fails(capsys, "keys", keys)
    assert code == 2
    assert "server.key is there already; give a new directory" in line


def test_the_commands_of_the_guide_that_make_keys(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = commands("keys", "docs/guide/workers.md")
    assert len(found) == 2
    for command in found:
        with pytest.raises(SystemExit) as caught:
            main(command.split()[1:])
        assert caught.value.code == 0
        assert (tmp_path / command.split()[2] / "server.key").exists()
