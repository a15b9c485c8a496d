"""A network namespace of this machine that stands for another host: its wire can be cut, and made slow."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

__all__ = ["NetworkHost", "network_host"]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class NetworkHost:
    """near: the address of this side of the wire. enter: a command that runs another one in the namespace."""

    def __init__(self, number: int) -> None:
        self._name, self._ours, self._theirs = f"ringcore-{number}", f"rca{number}", f"rcb{number}"
        self.near, self._far = "198.18.77.1", "198.18.77.2"  # of the block for tests between networks
        self.enter = ("ip", "netns", "exec", self._name)

    def make(self) -> None:
        run("ip", "netns", "add", self._name)
        run("ip", "link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
        run("ip", "addr", "add", f"{self.near}/30", "dev", self._ours)
        run("ip", "-n", self._name, "addr", "add", f"{self._far}/30", "dev", self._theirs)
        run("ip", "link", "set", self._ours, "up")
        run("ip", "-n", self._name, "link", "set", "lo", "up")
        self.mend()

    def cut(self) -> None:
        """Every packet is lost from now on; no end is told."""
        run("ip", "-n", self._name, "link", "set", self._theirs, "down")

    def mend(self) -> None:
        run("ip", "-n", self._name, "link", "set", self._theirs, "up")

    def slow_down(self, megabits: int) -> None:
        """To the host; tc is not everywhere."""
        if shutil.which("tc") is None:
            pytest.skip("no tc")
        limit = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms")
        run("tc", "qdisc", "add", "dev", self._ours, "root", *limit)

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip", "netns", "del", self._name)
        with contextlib.suppress(subprocess.CalledProcessError):  # its other end may be gone with the namespace
            run("ip", "link", "del", self._ours)


@contextlib.contextmanager
def network_host() -> Iterator[NetworkHost]:
    host = NetworkHost(os.getpid() % 100_000)
    try:
        try:
            host.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield host
    finally:
        host.remove()
