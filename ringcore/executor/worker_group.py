"""The workers of one executor, by rank, wherever they run; the queues to and from them, and their shutdown."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from ringcore.config import EngineConfig
from ringcore.config.rank_layout import LOCALHOST
from ringcore.errors import EngineDeadError
from ringcore.executor.message_queue import MessageReader, queue_writer
from ringcore.executor.status_board import RankStatus
from ringcore.executor.waiting import Event
from ringcore.executor.worker_host import HostStart, NearHost, WorkerHost, WorkerProcess
from ringcore.protocol.messages import RankHealth

__all__ = ["HostStarter", "OneHost", "WorkerGroup", "host_starter"]

T = TypeVar("T")


class HostStarter(Protocol):
    """Starts the workers of a configuration, as often as they are replaced."""

    def start(self) -> list[WorkerHost]:
        """The hosts, all of whose workers have been started; the caller closes them."""
        ...

    def interrupt(self) -> None:
        """Ends a `start` that waits, in another thread."""
        ...

    def close(self) -> None: ...


class OneHost:
    """A `HostStarter`: every rank is on this host."""

    def __init__(self, config: EngineConfig, factory: str) -> None:
        self._start = HostStart(config, LOCALHOST, factory)

    def start(self) -> list[WorkerHost]:
        return [NearHost(self._start)]

    def interrupt(self) -> None:
        pass  # `start` does not wait for other hosts

    def close(self) -> None:
        pass


def host_starter(config: EngineConfig, factory: str) -> HostStarter:
    """By the hosts of the ranks. Raises `ConfigError` where others cannot join."""
    if set(config.parallel.layout.hosts) == {LOCALHOST}:
        return OneHost(config, factory)
    from ringcore.executor.far.several_hosts import SeveralHosts  # imports ZeroMQ

    return SeveralHosts(config, factory)


class WorkerGroup:
    """All workers of an engine, until `close`.

    children, replies: by rank. calls, control: the queues that all of them read, one for ordered calls and one
    for read-only methods. events, sources: of the replies (see `MessageReader`). deaths: descriptors that become
    readable when a worker has ended or a host is lost. closing, due: events of the executor, which end its own waits,
    and wake it for a call that is due.
    killed_for: the reason why this side killed the workers, which becomes the error of their death.
    """

    def __init__(self, hosts: Sequence[WorkerHost]) -> None:
        self._cleanup = ExitStack()
        self._lock = threading.RLock()  # a signal handler may close in the middle of a close
        self._owner_pid = os.getpid()
        self.killed_for: EngineDeadError | None = None
        self._hosts = hosts
        for host in hosts:
            self._cleanup.callback(host.close)
        for host in hosts:  # first: workers may wait for each other until they exit
            self._cleanup.callback(host.hang_up)
        try:
            self.closing, self.due = self._event(), self._event()
        except BaseException:
            self._cleanup.close()
            raise
        self.children: list[WorkerProcess] = _by_rank([(host.ranks, host.children) for host in hosts])
        self.replies: list[MessageReader] = _by_rank([(host.ranks, host.replies) for host in hosts])
        self.calls = queue_writer([host.calls for host in hosts])
        self.control = queue_writer([host.control for host in hosts])
        self.events = [fd for reader in self.replies for fd in reader.events]
        self.sources = sorted({fd for reader in self.replies for fd in reader.sources})
        self.deaths = [fd for host in hosts for fd in host.deaths]

    def _event(self) -> Event:
        event = Event()
        self._cleanup.callback(event.close)
        return event

    def on_close(self, *callbacks: Callable[[], None]) -> None:
        """Registers callbacks that run first when the group closes."""
        for callback in callbacks:
            self._cleanup.callback(callback)

    def kill(self, reason: EngineDeadError | None = None) -> None:
        """SIGKILL to every worker; `close` then does not wait."""
        if reason is not None and self.killed_for is None:
            self.killed_for = reason
        for child in self.children:
            child.signal(signal.SIGKILL)

    def statuses(self) -> list[RankStatus]:
        """Each rank's line of the status board, by rank."""
        return _by_rank([(host.ranks, host.statuses()) for host in self._hosts])

    def health(self) -> list[RankHealth]:
        """Each rank's health from status board and kernel, without a call. Works after the group's end too."""
        now = time.monotonic_ns()
        return [
            RankHealth(
                rank=rank,
                pid=child.pid,
                process_state=child.process_state(),
                heartbeat_age_s=max(0, now - status.heartbeat_ns) / 1e9,
                method=status.method if status.busy_since_ns else None,
                busy_s=max(0, now - status.busy_since_ns) / 1e9 if status.busy_since_ns else 0.0,
                num_calls=status.num_calls,
            )
            for rank, (child, status) in enumerate(zip(self.children, self.statuses(), strict=True))
        ]

    def close(self) -> None:
        """Closes the queues, after which workers exit once they have executed the sent calls; kills those that do not;
        frees everything. Idempotent.

        Takes at most about 5 seconds (and 2 after SIGTERM) a host, for a worker that is stuck. In a fork of the owner
        it does nothing: the workers are not its children.
        """
        if not self.is_ours:
            return
        with self._lock:
            self._cleanup.close()

    def interrupt(self) -> None:
        """Signals `closing`: waits in all threads end."""
        if self.is_ours:
            self.closing.signal()

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers: a fork of it must not end them."""
        return os.getpid() == self._owner_pid


def _by_rank(of_hosts: Sequence[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """What each host has for its ranks, in the order of all ranks."""
    found = {rank: one for ranks, own in of_hosts for rank, one in zip(ranks, own, strict=True)}
    return [found[rank] for rank in sorted(found)]
