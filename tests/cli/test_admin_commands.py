"""`ringcore rpc` and `ringcore keys`."""

from __future__ import annotations

import json
import stat

import pytest
from admin_peers import EchoEngine
from typer.testing import CliRunner

from ringcore.cli import main
from ringcore.cli.app import make_app
from ringcore.cli.rpc import _plain
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
    return CliRunner().invoke(make_app(), list(args), catch_exceptions=False)


def fails(capsys, *args) -> tuple[int, str]:
    """The exit code and the one line of the error."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    (line,) = capsys.readouterr().err.splitlines()
    return caught.value.code, line


def test_a_line_of_json_a_rank(engine, keys):
    result = invoke("rpc", engine.address, "echo", "--keys", keys)
    assert result.exit_code == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [[0, [], {}], [1, [], {}]]


def test_arguments_are_json_or_else_strings(engine, keys):
    given = ["word", "3", "1.5", "null", "true", '"3"', '{"a": [1]}', "[1", "", "a b", "--", "-1"]
    result = invoke("rpc", engine.address, "echo", "--keys", keys, "--rank", "1", *given)
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == [1, ["word", 3, 1.5, None, True, "3", {"a": [1]}, "[1", "", "a b", -1], {}]


def test_the_timeout_reaches_the_engine(engine, keys):
    assert invoke("rpc", engine.address, "echo", "--keys", keys, "--timeout", "7").exit_code == 0
    assert 6 < engine.calls[-1].timeout_s <= 7


def test_a_call_of_the_engine_itself(engine, keys):
    result = invoke("rpc", engine.address, "pause", "all", "--engine", "--keys", keys)
    assert (result.exit_code, result.stdout) == (0, "null\n")
    assert (engine.calls[-1].target, engine.calls[-1].method) == ("engine", "pause")


def test_the_list_of_methods(engine, keys):
    result = invoke("rpc", engine.address, "--list", "--keys", keys)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "workers  call       changes  fail() -> None  Raises an error of rank 1." in lines
    assert "workers  read       reads    look() -> object" in lines
    assert any(
        line.startswith("engine   lifecycle  changes  pause(mode: PauseMode = 'new') -> None  ") for line in lines
    )
    assert not any("shutdown" in line for line in lines)


def test_arrays_and_tensors_are_lists():
    import msgspec
    import numpy as np

    value = {"a": np.eye(2, dtype=np.int8), "t": HostTensor("float32", (2,), bytes(8)), "c": np.array([1 + 2j])}
    got = json.loads(msgspec.json.encode(value, enc_hook=_plain))
    assert got == {"a": [[1, 0], [0, 1]], "t": [0.0, 0.0], "c": [[1.0, 2.0]]}


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["fail"], 1, "KeyError: 'x'"),
        (["shutdown"], 2, "method='shutdown': only the engine itself calls it on its workers; close its owner (LLM, "),
        ([], 2, "METHOD: give the name of a method, or --list"),
        (["pause", "--engine", "--rank", "0"], 2, "rank=0: only calls to workers have one; leave it out"),
        (["echo", "--list"], 2, "METHOD: give the name of a method, or --list"),
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
