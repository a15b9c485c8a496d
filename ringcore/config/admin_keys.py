"""The admin endpoint's TCP address, and the CurveZMQ keys that authorize its clients, in a directory.

    DIR/                    0700
      server.key            the engine's public key; clients have a copy
      server.key_secret     the engine's secret key, readable by its owner only
      client.key_secret     a client's secret key, readable by its owner only
      clients/              the public keys of the authorized clients
        client.key          one file each, any name that ends in .key

The metadata section of a client's public key has the scopes of its calls, e.g. `scope = "read call"` (see `scopes`).
Without such a line the client has the scope `read` only.

The engine reads server.key_secret and clients/; a client reads server.key and client.key_secret.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringcore.errors import ConfigError
from ringcore.protocol.scopes import SCOPES

__all__ = [
    "ClientKeys",
    "KnownClient",
    "ServerKeys",
    "check_endpoint",
    "create_keys",
    "new_keys",
    "public_key_of",
    "read_client_keys",
    "read_key",
    "read_server_keys",
]

SERVER, CLIENT, CLIENTS = "server", "client", "clients"
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/;\s]+):(?P<port>\*|[0-9]{1,5})")
_SCOPE = "scope"  # the key of the line in the metadata
_KEY_CHARS = 40  # 32 bytes in Z85


@dataclass(frozen=True, slots=True)
class KnownClient:
    """An authorized client. name: the file's, without .key. file: its path."""

    name: str
    scopes: frozenset[str]
    file: str


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys as 40 characters of Z85. clients: the authorized clients, by public key."""

    secret: bytes = field(repr=False)
    clients: Mapping[bytes, KnownClient]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys as 40 characters of Z85; `server` is the engine's public one."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


def check_endpoint(option: str, endpoint: object, *, to_listen: bool) -> None:
    """Raises `ConfigError` unless it is "tcp://HOST:PORT". Port 0 or *, and host *, are for listening only."""
    found = _ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise _bad(option, endpoint, "give tcp://HOST:PORT, e.g. tcp://127.0.0.1:5600")
    if not to_listen and (found["port"] in ("*", "0") or found["host"] == "*"):
        raise _bad(option, endpoint, "give the host and port that the engine reports: EngineReady.admin_endpoint")


def require_curve(option: str, value: object) -> None:
    """Raises `ConfigError` where the installed ZeroMQ cannot encrypt."""
    import zmq

    if not zmq.has("curve"):
        remedy = "this ZeroMQ was built without CURVE, so that it could not be protected; install the wheel of pyzmq"
        raise _bad(option, value, remedy)


# ---------------------------------------------------------------------------------------------------------------
# Reading.


def read_server_keys(directory: str | os.PathLike[str], option: str = "admin_keys") -> ServerKeys:
    """The engine's keys in the directory. Raises `ConfigError` (of `option`): see `_Directory`."""
    keys = _Directory(option, directory)
    secret = keys.secret(SERVER)
    keys.refuse_writable(keys.path / CLIENTS)
    files = sorted((keys.path / CLIENTS).glob("*.key"))
    if not files:
        raise keys.bad(f"no client's public key in {CLIENTS}/; put the client.key of 'ringcore keys' there")
    clients: dict[bytes, KnownClient] = {}
    for file in files:
        public = keys.public(file)
        if public in clients:
            raise keys.bad(f"{file.name} and {clients[public].name}.key in {CLIENTS}/ are the same key; take one away")
        clients[public] = KnownClient(file.stem, keys.scopes(file), str(file))
    return ServerKeys(secret, clients)


def read_client_keys(directory: str | os.PathLike[str]) -> ClientKeys:
    """A client's keys in the directory. Raises `ConfigError` (`keys`): see `_Directory`."""
    keys = _Directory("keys", directory)
    secret = keys.secret(CLIENT)
    return ClientKeys(keys.public(keys.path / f"{SERVER}.key"), public_key_of(secret), secret)


def read_key(option: str, key: str | bytes) -> bytes:
    """A key given as 40 characters of Z85. Raises `ConfigError`, which does not reveal it."""
    raw = key.encode("utf-8", "replace") if isinstance(key, str) else key
    if not isinstance(raw, bytes) or not _is_key(raw):
        raise _bad(option, "...", f"no CurveZMQ key; give its {_KEY_CHARS} characters of Z85")
    return raw


def public_key_of(secret: bytes) -> bytes:
    import zmq

    return zmq.curve_public(secret)


def new_keys(client: str) -> tuple[ServerKeys, ClientKeys]:
    """Keys for one engine and one client of this name, in memory alone."""
    import zmq

    (server, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return ServerKeys(server_secret, {public: KnownClient(client, frozenset(), "")}), ClientKeys(server, public, secret)


class _Directory:
    """A directory of keys, for the `option` that names it.

    It refuses missing or unreadable files, secret keys that other users may read, and files or directories that other
    users may write, since they could authorize themselves.
    """

    def __init__(self, option: str, path: str | os.PathLike[str]) -> None:
        self._option = option
        self.path = Path(path)
        require_curve(option, os.fspath(path))
        if not self.path.is_dir():
            raise self.bad("no such directory; make one by 'ringcore keys DIR'")
        self.refuse_writable(self.path)

    def bad(self, remedy: str) -> ConfigError:
        return _bad(self._option, os.fspath(self.path), remedy)

    def secret(self, name: str) -> bytes:
        file = self.path / f"{name}.key_secret"
        if self._mode(file) & 0o077:
            raise self.bad(f"others may read the secret key in {file.name}; make it private by 'chmod 600 {file}'")
        secret = self._load(file)[1]
        if secret is None or not _is_key(secret):
            raise self.bad(f"no secret key in {file.name}; make keys by 'ringcore keys DIR'")
        return secret

    def public(self, file: Path) -> bytes:
        self.refuse_writable(file)
        public = self._load(file)[0]
        if not _is_key(public):
            raise self.bad(f"no public key in {file.relative_to(self.path)}; copy the file once more, or take it away")
        return public

    def scopes(self, file: Path) -> frozenset[str]:
        """The scopes in a client's public key file, which `public` has read."""
        pairs = [line.partition("=") for line in file.read_text("utf-8", "replace").splitlines()]
        given = [value for key, _, value in pairs if key.strip() == _SCOPE]
        if not given:
            return frozenset(("read",))
        names = frozenset(name for value in given for name in value.strip(" \t'\"").replace(",", " ").split())
        if unknown := sorted(names - set(SCOPES)):
            raise self.bad(f"{_SCOPE}={unknown[0]!r} in {file.relative_to(self.path)}: give of {', '.join(SCOPES)}")
        return names

    def refuse_writable(self, path: Path) -> None:
        if self._mode(path) & 0o022:
            raise self.bad(f"others may write to {path}; forbid it by 'chmod go-w {path}'")

    def _mode(self, path: Path) -> int:
        try:
            return path.stat().st_mode
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _load(self, file: Path) -> tuple[bytes, bytes | None]:
        import zmq.auth

        try:
            return zmq.auth.load_certificate(file)
        except (OSError, ValueError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, path: Path, error: Exception) -> ConfigError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return self.bad(f"{path.name} cannot be read ({reason}); give a directory made by 'ringcore keys DIR'")


def _is_key(key: bytes) -> bool:
    from zmq.utils import z85

    if len(key) != _KEY_CHARS:
        return False
    try:
        return len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _bad(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{option}={value!r}: {remedy}", option=option, value=repr(value))


# ---------------------------------------------------------------------------------------------------------------
# Creating.


def create_keys(directory: str | os.PathLike[str], scopes: Iterable[str] = SCOPES) -> Path:
    """Creates keys for one engine and one client, in a directory with mode 0700. Returns its path.

    scopes: of the client's calls. Raises `ConfigError`: of `scope` for an unknown one, of `directory` where it already
    has keys, or other users can enter it.
    """
    given = set(scopes)
    if unknown := sorted(given - set(SCOPES)):
        raise _bad("scope", unknown[0], f"give of {', '.join(SCOPES)}")
    path = Path(directory)
    require_curve("directory", os.fspath(path))
    clients = path / CLIENTS
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            raise _bad("directory", os.fspath(path), "others can enter it; give a new directory, or 'chmod 700' it")
        for file in (*(path / f"{name}{end}" for name in (SERVER, CLIENT) for end in (".key", ".key_secret")), clients):
            if file.exists():
                raise _bad("directory", os.fspath(path), f"{file.name} is there already; give a new directory")
        clients.mkdir(mode=0o700)
        for name in (SERVER, CLIENT):
            _create_pair(path, name)
        public = (path / f"{CLIENT}.key").rename(clients / f"{CLIENT}.key")
        _write_scopes(public, [scope for scope in SCOPES if scope in given])
    except OSError as error:
        raise _bad("directory", os.fspath(path), f"cannot be written: {error.strerror}; give another one") from error
    return path


def _create_pair(path: Path, name: str) -> None:
    import zmq.auth

    zmq.auth.create_certificates(path, name)  # with the umask's mode, in a directory that other users cannot enter
    for end in (".key", ".key_secret"):
        (path / f"{name}{end}").chmod(0o600)


def _write_scopes(public: Path, scopes: Iterable[str]) -> None:
    """Writes the scopes to the metadata of the certificate; pyzmq writes no metadata to a public one."""
    section, _, keys = public.read_text().partition("\ncurve\n")
    public.write_text(f'{section}\n    {_SCOPE} = "{" ".join(scopes)}"\ncurve\n{keys}')
