"""The engines on this host that this user may call, found without asking them.

/proc/net/unix lists their sockets (`local_name`). The process that has the socket open has a description too
(`admin.opening`), which the kernel lets this user read through /proc/PID/fd: so an engine that starts, hangs or is
stopped is found and described like any other. Of an engine in a pid namespace that this process cannot see, only its
socket is known.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ringcore.engine_core.admin.local_name import LocalName, peer_credentials
from ringcore.engine_core.admin.opening import DESCRIPTION
from ringcore.errors import InvalidRequestError
from ringcore.executor.status_board import RankStatus, StatusBoard, read_owner
from ringcore.front_end.local_connection import connect
from ringcore.protocol.engine_description import EngineDescription

__all__ = ["LocalEngine", "find_engine", "find_engines", "local_engines"]

_ACCEPTS = 0x10000  # the flag of a listening socket; one that was accepted has its name too
_ROOT = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """pid: of the engine process, as this process counts; None in a pid namespace that it cannot see. description: None
    if it cannot be read."""

    name: LocalName
    pid: int | None = None
    description: EngineDescription | None = None

    @property
    def engine_id(self) -> str:
        return self.name.engine_id

    @property
    def uid(self) -> int:
        return self.name.uid

    @property
    def model(self) -> str | None:
        return None if self.description is None else self.description.model

    @property
    def owner_pid(self) -> int | None:
        """Of the process that started it, or has adopted it since, as the engine counts."""
        started_by = None if self.description is None else self.description.owner_pid
        return self._read_board(read_owner) or started_by

    def status(self) -> RankStatus | None:
        """What its process last wrote into shared memory, without being asked: see `engine_core.heartbeat`. None if it
        cannot be read."""
        return self._read_board(lambda fd: StatusBoard(fd, 1).read(0))

    def _read_board(self, read: Callable[[int], T | None]) -> T | None:
        if self.pid is None or self.description is None:
            return None
        with suppress(OSError, struct.error):
            fd = os.open(f"/proc/{self.pid}/fd/{self.description.status_fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read(fd)
            finally:
                os.close(fd)
        return None

    def __str__(self) -> str:
        whose = "" if self.uid == os.geteuid() else f" of user {self.uid}"
        return f"{self.name.pid} ({self.engine_id}, {self.model or 'model unknown'}{whose})"


def local_engines(proc: Path = Path("/proc")) -> list[LocalEngine]:
    """The engines of this user in this network namespace, the oldest first; for root those of every user."""
    found = [
        _look_at(name, inode, proc)
        for name, inode in _listening(_lines(proc / "net" / "unix"))
        if os.geteuid() in (_ROOT, name.uid)
    ]
    return sorted((one for one in found if one is not None), key=lambda one: (one.description is None, _started_s(one)))


def _started_s(engine: LocalEngine) -> float:
    return 0.0 if engine.description is None else engine.description.started_s


def find_engine(wanted: str | int | None = None, among: Sequence[LocalEngine] | None = None) -> LocalEngine:
    """The engine with this pid, or whose owner has it, with an id that begins so, or of this model (its name, path, or
    last part of it); None: the only one. Root finds another user's engine by a pid or its id alone.

    Raises `InvalidRequestError`, with the candidates, if none fits or several do.
    """
    engines = local_engines() if among is None else among
    fitting = _fitting(wanted, engines)
    if len(fitting) == 1:
        return fitting[0]
    raise _not_one(wanted, fitting, engines)


def find_engines(wanted: str | int | None = None, among: Sequence[LocalEngine] | None = None) -> list[LocalEngine]:
    """As `find_engine`, but all that fit, the oldest first; None: every engine of this user. Raises
    `InvalidRequestError`, with the candidates, if none fits."""
    engines = local_engines() if among is None else among
    fitting = _fitting(wanted, engines)
    if not fitting:
        raise _not_one(wanted, fitting, engines)
    return fitting


def _fitting(wanted: str | int | None, engines: Sequence[LocalEngine]) -> list[LocalEngine]:
    ours = [one for one in engines if one.uid == os.geteuid()]
    if wanted is None:
        return ours
    text = str(wanted)
    fitting = [one for one in engines if text == str(one.pid or one.name.pid)]
    fitting = fitting or [one for one in engines if one.owner_pid is not None and text == str(one.owner_pid)]
    fitting = fitting or [one for one in ours if _is_of_model(one, text)]
    return fitting or [one for one in engines if text and one.engine_id.startswith(text)]


def _is_of_model(engine: LocalEngine, text: str) -> bool:
    model = (engine.model or "").rstrip("/")
    return bool(model) and text.rstrip("/") in (model, os.path.basename(model))


def _not_one(wanted: str | int | None, fitting: Sequence[LocalEngine], engines: Sequence[LocalEngine]) -> Exception:
    shown = "" if wanted is None else f"{str(wanted)!r}: "
    if fitting:
        text = f"{shown}{len(fitting)} engines fit; give the pid of one: {_listed(fitting)}"
    elif engines:
        text = f"{shown}no such engine; give a pid, the beginning of an id, or a model of: {_listed(engines)}"
    else:
        text = (
            f"{shown}user {os.geteuid()} runs no engine in this network namespace; look at 'ringcore ps', or give "
            "tcp://HOST:PORT and --keys"
        )
    return InvalidRequestError(f"engine: {text}", field="engine", value=wanted)


def _listed(engines: Iterable[LocalEngine]) -> str:
    return ", ".join(str(one) for one in engines)


# ---------------------------------------------------------------------------------------------------------------
# /proc.


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _listening(lines: Iterable[str]) -> Iterable[tuple[LocalName, int]]:
    """Names and inodes. Any user can listen under any name, and put a line break into it: nothing here is trusted."""
    for line in lines:
        match line.split():
            case [_, _, _, flags, _, _, inode, path] if path.startswith("@") and inode.isdecimal():
                name = LocalName.parse(path[1:])
                if name is not None and flags == f"{_ACCEPTS:08X}":
                    yield name, int(inode)


def _look_at(name: LocalName, inode: int, proc: Path) -> LocalEngine | None:
    """None if it is no engine of that user, or is gone."""
    pid: int | None = name.pid
    links = _links(proc, name.pid)
    if f"socket:[{inode}]" not in links.values() or _user(proc, name.pid) != name.uid:
        try:  # in another pid namespace, perhaps one inside this process's
            with connect(name) as sock:
                pid = peer_credentials(sock).pid or None
        except BlockingIOError:
            pid = None
        except OSError:
            return None
        links = {} if pid is None else _links(proc, pid)
    return LocalEngine(name, pid, _description(links, name.engine_id))


def _links(proc: Path, pid: int) -> dict[Path, str]:
    """What each descriptor of a process is; empty for one that this user may not look into."""
    links = {}
    with suppress(OSError):
        for fd in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):
                links[fd] = os.readlink(fd)
    return links


def _user(proc: Path, pid: int) -> int | None:
    with suppress(OSError):
        for line in (proc / str(pid) / "status").read_text("utf-8", "replace").splitlines():
            match line.split():
                case ["Uid:", _, effective, *_]:
                    return int(effective)
    return None


def _description(links: dict[Path, str], engine_id: str) -> EngineDescription | None:
    for fd, link in links.items():
        if f"ringcore-{DESCRIPTION}" in link:
            with suppress(OSError, msgspec.MsgspecError):
                found = msgspec.msgpack.decode(fd.read_bytes(), type=EngineDescription)
                if found.engine_id == engine_id:
                    return found
    return None
