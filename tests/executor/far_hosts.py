"""A MultiprocExecutor whose other hosts are agents on this machine, joined by the command."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fake_worker import FACTORY, fake_config
from far_agent import Agent

from ringcore.config.admin_keys import create_keys
from ringcore.executor.far.several_hosts import free_port
from ringcore.executor.multiproc import MultiprocExecutor


def executor_of(hosts: list[str], endpoint: str, keys: str, trouble: str = "", **parallel) -> MultiprocExecutor:
    """Not started yet."""
    options = {"hosts": hosts, "join_endpoint": endpoint, "join_keys": keys} | parallel
    return MultiprocExecutor(fake_config(len(hosts), trouble, **options), worker_factory=FACTORY)


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
