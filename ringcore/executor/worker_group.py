"""The worker processes of one executor, the queues to and from them, and their orderly end."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ringcore.config import EngineConfig
from ringcore.executor.child_process import ChildProcess, terminate_all
from ringcore.executor.message_queue import MessageReader, MessageWriter, QueueHandle, create_queue
from ringcore.executor.worker_proc import WorkerStart
from ringcore.protocol import encoder

__all__ = ["WorkerGroup", "usable_cores", "worker_environment"]

ENTRY = "ringcore.executor.worker_proc:main"
CALL_RING_BYTES = 64 << 20
REPLY_RING_BYTES = 8 << 20
GRACE_S = 5.0
# A finite spin of idle OpenMP threads is as fast as an endless one (2.3 times faster than none at batch 1), and ends.
GOMP_SPINCOUNT = "20000"


class WorkerGroup:
    """All workers of an engine, from construction (which starts them) to `close`.

    children, replies: by rank. calls: the one queue that all of them read. space_fd: an eventfd that is written when
    there is room in `calls` again. wake_fds: eventfds that are written when a reply has come, by rank. closing_fd: an
    eventfd for the executor to end its own waits with.
    `environment` is laid over this process's own in the workers; `spin_s` is how long they spin before they sleep.
    Raises `CapacityError` where shared memory is short; nothing is left behind then.
    """

    def __init__(
        self, config: EngineConfig, num_workers: int, factory: str, environment: Mapping[str, str], spin_s: float
    ) -> None:
        self._cleanup = ExitStack()
        self._lock = threading.RLock()  # a signal handler may close in the middle of a close
        self._owner_pid = os.getpid()
        self.children: list[ChildProcess] = []
        self.replies: list[MessageReader] = []
        try:
            self._start(config, num_workers, factory, environment, spin_s)
        except BaseException:
            self._cleanup.close()
            raise

    def _start(
        self, config: EngineConfig, num_workers: int, factory: str, environment: Mapping[str, str], spin_s: float
    ) -> None:
        # What is pushed last is undone first: the queues are closed, the processes end, then the rest goes.
        self._meeting_place = _make_meeting_place() if num_workers > 1 else None
        self._cleanup.callback(self.remove_meeting_place)
        self.closing_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cleanup.callback(os.close, self.closing_fd)
        calls = self._queue(CALL_RING_BYTES, num_workers)
        replies = [self._queue(REPLY_RING_BYTES, 1) for _ in range(num_workers)]
        self.space_fd = calls.ring.space_fd
        self.wake_fds = [queue.ring.wake_fds[0] for queue in replies]
        self._cleanup.callback(lambda: terminate_all(self.children, GRACE_S))
        self.calls = MessageWriter(calls)
        self._cleanup.callback(self.calls.close)
        for rank, queue in enumerate(replies):
            start = WorkerStart(config, rank, self._rendezvous, factory, spin_s)
            fds = _prefixed("calls.", calls.fds_of_reader(rank)) | _prefixed("replies.", queue.fds_of_writer())
            child = ChildProcess.start(f"worker {rank}", ENTRY, encoder().encode(start), fds, environment)
            self.children.append(child)
            reader = MessageReader(queue, 0)
            self._cleanup.callback(reader.close)
            self.replies.append(reader)
            queue.close_sending()
        calls.close_receiving()

    def _queue(self, capacity: int, num_readers: int) -> QueueHandle:
        queue = create_queue(capacity, num_readers)
        self._cleanup.callback(queue.close)
        return queue

    @property
    def _rendezvous(self) -> str | None:
        return None if self._meeting_place is None else str(self._meeting_place / "rendezvous")

    def remove_meeting_place(self) -> None:
        """Removes the directory where the ranks met; called as soon as all have. Idempotent."""
        if self._meeting_place is not None:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._meeting_place)
            self._meeting_place = None

    def close(self) -> None:
        """Tells the workers to leave after what they have been sent, then makes them; frees everything. Idempotent.

        Takes at most about 5 seconds (and 2 after SIGTERM), for a worker that is stuck. In a process that the owner
        forked it does nothing: the workers are not its own.
        """
        if not self.is_ours:
            return
        with self._lock:
            self._cleanup.close()

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers: one that was forked from it must leave them alone."""
        return os.getpid() == self._owner_pid


def _make_meeting_place() -> Path:
    return Path(tempfile.mkdtemp(prefix="ringcore-"))  # mode 0700


def _prefixed(prefix: str, fds: Mapping[str, int]) -> dict[str, int]:
    return {prefix + name: fd for name, fd in fds.items()}


def usable_cores() -> int:
    """The cores that this process may use: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def worker_environment(user: Mapping[str, str], num_cores: int, num_workers: int) -> dict[str, str]:
    """What to lay over the environment `user` for a worker: its share of the cores, unless the user has said."""
    ours: dict[str, str] = {}
    num_threads = max(1, num_cores // num_workers)
    if "OMP_NUM_THREADS" not in user:
        ours["OMP_NUM_THREADS"] = str(num_threads)
    elif user["OMP_NUM_THREADS"].isdecimal():
        num_threads = int(user["OMP_NUM_THREADS"])
    if num_threads > 1 and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & user.keys():
        ours |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": GOMP_SPINCOUNT}
    if num_workers > 1 and "GLOO_SOCKET_IFNAME" not in user:
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    return ours
