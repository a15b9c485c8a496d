"""The keys of an admin endpoint: how they are made, and what is refused of a directory before anything listens."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.config.admin_keys import KnownClient, create_keys, public_key_of, read_client_keys, read_server_keys
from ringcore.errors import ConfigError
from ringcore.protocol.scopes import SCOPES

ENDPOINT = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return create_keys(tmp_path_factory.mktemp("admin") / "deep" / "keys")


@pytest.fixture
def keys(made, tmp_path):
    """A copy to damage."""
    copy = tmp_path / "keys"
    shutil.copytree(made, copy)
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---------------------------------------------------------------------------------------------------------------
# Making.


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_can_read_them_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = create_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert {str(p.relative_to(path)): mode(p) for p in [path, *path.rglob("*")]} == {
        ".": 0o700,
        "server.key": 0o600,
        "server.key_secret": 0o600,
        "client.key_secret": 0o600,
        "clients": 0o700,
        "clients/client.key": 0o600,
    }


def test_the_two_sides_fit(made):
    server, client = read_server_keys(made), read_client_keys(made)
    file = str(made / "clients" / "client.key")
    assert server.clients == {client.public: KnownClient("client", frozenset(SCOPES), file)}
    assert client.server == public_key_of(server.secret)
    assert client.public == public_key_of(client.secret)
    assert client.secret.decode() not in repr(client)
    assert server.secret.decode() not in repr(server)


def test_nothing_is_overwritten(keys):
    before = {p: p.read_bytes() for p in keys.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"server\.key is there already; give a new directory"):
        create_keys(keys)
    assert {p: p.read_bytes() for p in keys.rglob("*") if p.is_file()} == before


def test_a_directory_that_others_can_enter(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="others can enter it; give a new directory, or 'chmod 700' it"):
        create_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*; give another one"):
        create_keys(tmp_path / "file" / "keys")


# ---------------------------------------------------------------------------------------------------------------
# What an engine refuses.


def damaged(keys, how):
    match how:
        case "missing":
            shutil.rmtree(keys)
        case "a file":
            shutil.rmtree(keys)
            keys.touch()
        case "no server key":
            (keys / "server.key_secret").unlink()
        case "readable by the group":
            (keys / "server.key_secret").chmod(0o640)
        case "readable by all":
            (keys / "server.key_secret").chmod(0o604)
        case "a directory open to the group":
            keys.chmod(0o770)
        case "clients open to all":
            (keys / "clients").chmod(0o703)
        case "a client's key open to all":
            (keys / "clients" / "client.key").chmod(0o646)
        case "no clients":
            shutil.rmtree(keys / "clients")
        case "no client":
            (keys / "clients" / "client.key").unlink()
        case "a broken client":
            (keys / "clients" / "client.key").write_text('public-key = "short"')
        case "an empty client":
            (keys / "clients" / "client.key").write_text("")
        case "a public key as the secret one":
            shutil.copy(keys / "server.key", keys / "server.key_secret")
        case "a broken secret key":
            (keys / "server.key_secret").write_text('public-key = "x"\nsecret-key = "' + "~" * 40 + '"')

        case "the same client twice":
            shutil.copy(keys / "clients" / "client.key", keys / "clients" / "other.key")
        case "a scope that is none":
            write_scope(keys, 'scope = "read admin"')


def write_scope(keys: Path, *lines: str) -> None:
    file = keys / "clients" / "client.key"
    before, _, rest = file.read_text().partition('    scope = "read call lifecycle"\n')
    assert rest, "create_keys wrote no scopes"
    file.write_text(before + "".join(f"    {line}\n" for line in lines) + rest)


@pytest.mark.parametrize(
    ("lines", "scopes"),
    [
        ([], {"read"}),
        (['# scope = "lifecycle"', 'scopes = "call"'], {"read"}),
        (['scope = "read call"'], {"read", "call"}),
        (["scope=lifecycle,call"], {"lifecycle", "call"}),
        (["scope = 'read'", "scope = 'call'"], {"read", "call"}),
        (['scope = ""'], set()),
    ],
)
def test_the_scopes_of_a_client_are_in_its_file(keys, lines, scopes):
    write_scope(keys, *lines)
    (client,) = read_server_keys(keys).clients.values()
    assert (client.name, client.scopes, client.file) == ("client", scopes, str(keys / "clients" / "client.key"))


@pytest.mark.parametrize("given", [("read",), ("lifecycle", "call"), ("read", "call", "lifecycle")])
def test_keys_are_made_with_scopes(tmp_path, given):
    path = create_keys(tmp_path / "keys", given)
    ((public, client),) = read_server_keys(path).clients.items()
    assert client.scopes == set(given)
    assert zmq.auth.load_certificate(Path(client.file)) == (public, None)
    assert mode(Path(client.file)) == 0o600


REFUSALS = {
    "missing": "no such directory; make one by 'ringcore keys DIR'",
    "a file": "no such directory; make one by 'ringcore keys DIR'",
    "no server key": "server.key_secret cannot be read (No such file or directory); give a directory made by",
    "readable by the group": "others may read the secret key in server.key_secret; make it private by 'chmod 600 ",
    "readable by all": "others may read the secret key in server.key_secret; make it private by 'chmod 600 ",
    "a directory open to the group": "; forbid it by 'chmod go-w ",
    "clients open to all": "/clients; forbid it by 'chmod go-w ",
    "a client's key open to all": "/clients/client.key; forbid it by 'chmod go-w ",
    "no clients": "clients cannot be read (No such file or directory)",
    "no client": "no client's public key in clients/; put the client.key of 'ringcore keys' there",
    "a broken client": "no public key in clients/client.key; copy the file once more, or take it away",
    "an empty client": "client.key cannot be read (No public key found in ",
    "the same client twice": "other.key and client.key in clients/ are the same key; take one away",
    "a scope that is none": "scope='admin' in clients/client.key: give of read, call, lifecycle",
    "a public key as the secret one": "no secret key in server.key_secret; make keys by 'ringcore keys DIR'",
    "a broken secret key": "no secret key in server.key_secret; make keys by 'ringcore keys DIR'",
}


@pytest.mark.parametrize("how", REFUSALS)
def test_unusable_keys_are_refused_before_anything_starts(folder, keys, how):
    damaged(keys, how)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=ENDPOINT, admin_keys=keys)
    assert caught.value.message.startswith(f"admin_keys={str(keys)!r}: ")
    assert REFUSALS[how] in caught.value.message
    assert caught.value.details["option"] == "admin_keys"


@pytest.mark.parametrize(
    ("how", "says"), [(lambda f: f.chmod(0o644), "others may read the secret key"), (Path.unlink, "cannot be read")]
)
def test_a_client_is_as_careful_with_its_own(keys, how, says):
    how(keys / "client.key_secret")
    with pytest.raises(ConfigError, match=rf"^keys=.*{says}"):
        read_client_keys(keys)


def test_a_client_needs_no_more_than_two_files(keys):
    expected = read_client_keys(keys)
    (keys / "server.key_secret").unlink()
    shutil.rmtree(keys / "clients")
    assert read_client_keys(keys) == expected


# ---------------------------------------------------------------------------------------------------------------
# The two options.


def test_both_or_neither(folder, keys):
    with pytest.raises(ConfigError, match=r"^admin_endpoint='tcp://127\.0\.0\.1:0': give admin_keys too"):
        EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=ENDPOINT)
    with pytest.raises(ConfigError, match=r"^admin_keys=.*give admin_endpoint too, or neither"):
        EngineConfig.from_options(model=folder, load_format="dummy", admin_keys=keys)
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match=r"^admin_keys=.*: give a directory made by"):
            EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=ENDPOINT, admin_keys=wrong)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://*:5600", "tcp://0.0.0.0:0", "tcp://[::1]:65535"])
def test_an_endpoint_is_taken_as_it_is_written(folder, keys, endpoint):
    config = EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=endpoint, admin_keys=keys)
    assert (config.parallel.admin_endpoint, config.parallel.admin_keys) == (endpoint, str(keys))


NO_ENDPOINTS = ["", "ipc:///tmp/x", "udp://h:1", "127.0.0.1:5600", "tcp://:5600", "tcp://host", "tcp://host:", 5]
BAD_PARTS = [
    "tcp://h:65536",
    "tcp://h:-1",
    "tcp://::1:1",
    "tcp://h:1;tcp://g:2",
    "tcp://h:1/",
    "tcp://h:٣",
    "tcp://h h:1",
]


@pytest.mark.parametrize("endpoint", [*NO_ENDPOINTS, *BAD_PARTS])
def test_an_endpoint_that_is_none(folder, keys, endpoint):
    with pytest.raises(ConfigError, match=r"^admin_endpoint=.*: give tcp://HOST:PORT"):
        EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=endpoint, admin_keys=keys)


def test_a_zeromq_that_cannot_encrypt(folder, keys, tmp_path, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match=r"^admin_keys=.*built without CURVE.*install the wheel of pyzmq"):
        EngineConfig.from_options(model=folder, load_format="dummy", admin_endpoint=ENDPOINT, admin_keys=keys)
    with pytest.raises(ConfigError, match="built without CURVE"):
        create_keys(tmp_path / "new")
    assert not (tmp_path / "new").exists()
