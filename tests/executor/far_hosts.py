"""A MultiprocExecutor whose other hosts are agents on this machine, joined by the command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fake_worker import FACTORY, fake_config
from process_checks import BOUND_S

from ringcore.config.admin_keys import create_keys
from ringcore.executor.far.several_hosts import free_port
from ringcore.executor.multiproc import MultiprocExecutor

COMMAND = [sys.executable, "-m", "ringcore.cli"]


def executor_of(hosts: list[str], endpoint: str, keys: str, trouble: str = "", **parallel) -> MultiprocExecutor:
    """Not started yet."""
    options = {"hosts": hosts, "join_endpoint": endpoint, "join_keys": keys} | parallel
    return MultiprocExecutor(fake_config(len(hosts), trouble, **options), worker_factory=FACTORY)


def with_tests() -> dict[str, str]:
    """The environment of a process that imports from this folder."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


class Hosts:
    """Agents by the name of their host. `executor` is not started yet."""

    def __init__(self, folder: Path, hosts: list[str], address: str = "127.0.0.1", **options) -> None:
        self.keys = create_keys(folder / "keys")
        self.endpoint = f"tcp://{address}:{free_port(address)}"
        self.executor = executor_of(hosts, self.endpoint, str(self.keys), **options)
        self.agents: dict[str, Agent] = {}

    def join(self, name: str, *flags: str, keys: Path | None = None, under: tuple[str, ...] = ()) -> Agent:
        """Starts `ringcore worker`; `under` is a command that runs it."""
        agent = self.agents[name] = Agent(name, self.endpoint, keys or self.keys, flags, under)
        return agent

    def close(self) -> None:
        self.executor.shutdown()
        for agent in self.agents.values():
            agent.kill()


class Agent:
    """A process of `ringcore worker`. said: what it printed."""

    def __init__(self, name: str, endpoint: str, keys: Path, flags: Sequence[str], under: Sequence[str] = ()) -> None:
        command = [*under, *COMMAND, "worker", "--join", endpoint, "--keys", str(keys), "--name", name, *flags]
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `kill`
        self._process = subprocess.Popen(command, env=with_tests(), stderr=self._output)

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


@contextlib.contextmanager
def started(folder: Path, hosts: list[str], **options):
    """With all hosts joined and all workers started."""
    made = Hosts(folder, hosts, **options)
    try:
        for name in set(hosts) - {"localhost"}:
            made.join(name)
        made.executor.start()
        yield made
    finally:
        made.close()
