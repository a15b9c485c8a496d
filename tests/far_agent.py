"""Agents of other hosts, which are processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Agent", "with_path"]

COMMAND = [sys.executable, "-m", "ringcore.cli"]
BOUND_S = 60.0


def with_path(*folders: Path) -> dict[str, str]:
    """The environment of a process that also imports from these folders."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


class Agent:
    """A process of `ringcore worker`. said: what it printed."""

    def __init__(self, name: str, endpoint: str, keys: Path, flags: Sequence[str], under: Sequence[str] = ()) -> None:
        self._arguments = name, endpoint, keys, flags, under
        command = [*under, *COMMAND, "worker", "--join", endpoint, "--keys", str(keys), "--name", name, *flags]
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `kill`
        self._process = subprocess.Popen(
            command, env=with_path(Path(__file__).parent, Path(__file__).parent / "executor"), stderr=self._output
        )

    def again(self) -> Agent:
        """Another one with the same arguments."""
        return Agent(*self._arguments)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        code = self._process.wait(BOUND_S)
        self._output.seek(0)
        return code, self._output.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
