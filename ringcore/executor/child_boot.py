"""The system's side of a child process: the interpreter's command line, and the boot data that the child reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from ringcore.errors import RingcoreError
from ringcore.executor.ring_memory import unnamed_file
from ringcore.host.interpreter import import_path, interpreter_flags
from ringcore.host.log_forwarding import forwarded_level

__all__ = ["StartedProcess", "boot_memory", "start_process"]

# Only sets sys.path: everything else is in child_main, which can then be imported.
_BOOT = """\
import json, os, sys
with os.fdopen(int(sys.argv[1]), "rb") as boot:
    header = json.loads(boot.readline())
    payload = boot.read()
sys.path[:] = header["path"]
from ringcore.executor.child_main import run
run(header, payload)
"""


class StartedProcess(subprocess.Popen[bytes]):
    """A process that this one started."""

    @property
    def has_ended(self) -> bool:
        """Whether `wait` or `poll` has seen its end."""
        return self.returncode is not None


def start_process(
    name: str, boot_fd: int, log_fd: int, fds: list[int], env: Mapping[str, str] | None, own_session: bool
) -> StartedProcess:
    """own_session: without a terminal, whose signals go to the processes of the session."""
    try:
        return StartedProcess(
            [sys.executable, *interpreter_flags(), "-c", _BOOT, str(boot_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=fds,
            env={**os.environ, **env} if env else None,
            start_new_session=own_session,
        )
    except OSError as error:
        raise RingcoreError(f"cannot start the process {name!r} with {sys.executable}: {error}") from error


def boot_memory(name: str, entry: str, payload: bytes, fds: Mapping[str, int]) -> int:
    """A memfd with the child's boot data: a line of JSON, then the payload."""
    header = {"name": name, "entry": entry, "fds": dict(fds), "parent_pid": os.getpid(), "path": import_path()}
    header["log_level"] = forwarded_level()
    fd = unnamed_file("boot")
    try:
        with open(fd, "wb", closefd=False) as boot:
            boot.write(json.dumps(header).encode() + b"\n")
            boot.write(payload)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
