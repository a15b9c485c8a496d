"""The worker processes of one executor, the queues to and from them, and their shutdown."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError
from ringcore.executor.child_process import ChildProcess, terminate_all
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.ring_memory import PAGE, unnamed_file
from ringcore.executor.status_board import RankStatus, StatusBoard, create_board
from ringcore.executor.waiting import signal_event
from ringcore.executor.worker_proc import CALLS, CONTROL, RENDEZVOUS, REPLIES, STATUS, WorkerStart
from ringcore.host.cache_folder import cache_folder
from ringcore.protocol.codec import encode_start
from ringcore.protocol.messages import RankHealth

__all__ = ["WorkerGroup", "usable_cores", "worker_environment"]

ENTRY = "ringcore.executor.worker_proc:main"
CONTROL_RING_BYTES = 1 << 20
GRACE_S = 5.0
# A finite spin of idle OpenMP threads is as fast as an endless one (2.3 times faster than none at batch 1).
GOMP_SPINCOUNT = "20000"


class WorkerGroup:
    """All workers of an engine, from construction (which starts them) to `close`.

    children, replies: by rank. calls, control: the queues that all of them read, one for ordered calls and one
    for read-only methods. wake_fds: eventfds that are signalled when a reply has arrived, by rank. closing_fd, due_fd:
    eventfds of the executor, which end its own waits, and wake it for a call that is due.
    killed_for: the reason why this side killed the workers, which becomes the error of their death.
    `environment` updates this process's own in the workers; `spin_s` is how long they spin before they sleep.
    Raises `CapacityError` if shared memory is short, and then frees everything.
    """

    def __init__(
        self, config: EngineConfig, num_workers: int, factory: str, environment: Mapping[str, str], spin_s: float
    ) -> None:
        self._cleanup = ExitStack()
        self._lock = threading.RLock()  # a signal handler may close in the middle of a close
        self._owner_pid = os.getpid()
        self._is_closed = False
        self.children: list[ChildProcess] = []
        self.replies: list[NearReader] = []
        self.killed_for: EngineDeadError | None = None
        try:
            self._start(config, num_workers, factory, environment, spin_s)
        except BaseException:
            self._cleanup.close()
            raise

    def _start(
        self, config: EngineConfig, num_workers: int, factory: str, environment: Mapping[str, str], spin_s: float
    ) -> None:
        # Callbacks run in reverse order: the queues are closed, the processes end, then the rest is freed.
        self.closing_fd, self.due_fd = self._eventfd(), self._eventfd()
        parallel = config.parallel
        calls, control = (
            self._queue(parallel.call_ring_bytes, num_workers),
            self._queue(CONTROL_RING_BYTES, num_workers),
        )
        replies = [self._queue(parallel.reply_ring_bytes, 1) for _ in range(num_workers)]
        self.calls_space_fd, self.control_space_fd = calls.ring.space_fd, control.ring.space_fd
        self.wake_fds = [queue.ring.wake_fds[0] for queue in replies]
        status_fd = create_board(num_workers)
        self._cleanup.callback(os.close, status_fd)
        shared = {STATUS: status_fd}
        if num_workers > 1:
            shared[RENDEZVOUS] = unnamed_file("rendezvous")
            self._cleanup.callback(os.close, shared[RENDEZVOUS])
        self._board = StatusBoard(status_fd, num_workers)
        self._cleanup.callback(lambda: terminate_all(self.children, GRACE_S))
        self.calls, self.control = NearWriter(calls), NearWriter(control)
        self._cleanup.callback(self.control.close)
        self._cleanup.callback(self.calls.close)
        for rank, queue in enumerate(replies):
            start = WorkerStart(config, rank, factory, spin_s)
            fds = (
                _prefixed(CALLS, calls.fds_of_reader(rank))
                | _prefixed(CONTROL, control.fds_of_reader(rank))
                | _prefixed(REPLIES, queue.fds_of_writer())
                | shared
            )
            child = ChildProcess.start(f"worker {rank}", ENTRY, encode_start(start), fds, environment)
            self.children.append(child)
            reader = NearReader(queue, 0, spin_s=spin_s)
            self._cleanup.callback(reader.close)
            self.replies.append(reader)
            queue.close_sending()
        calls.close_receiving()
        control.close_receiving()

    def _eventfd(self) -> int:
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cleanup.callback(os.close, fd)
        return fd

    def _queue(self, num_bytes: int, num_readers: int) -> QueueHandle:
        queue = create_queue(-(-num_bytes // PAGE) * PAGE, num_readers)
        self._cleanup.callback(queue.close)
        return queue

    def on_close(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs first when the group closes."""
        self._cleanup.callback(callback)

    def kill(self, reason: EngineDeadError | None = None) -> None:
        """SIGKILL to every worker; `close` then does not wait."""
        if reason is not None and self.killed_for is None:
            self.killed_for = reason
        for child in self.children:
            child.signal(signal.SIGKILL)

    def statuses(self) -> list[RankStatus]:
        """Each rank's line of the status board, by rank."""
        return [self._board.read(rank) for rank in range(len(self.children))]

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

        Takes at most about 5 seconds (and 2 after SIGTERM), for a worker that is stuck. In a fork of the owner it does
        nothing: the workers are not its children.
        """
        if not self.is_ours:
            return
        with self._lock:
            self._is_closed = True
            self._cleanup.close()

    def interrupt(self) -> None:
        """Makes `closing_fd` readable: waits in all threads end."""
        with self._lock:  # after the close the descriptor's number may be another file's
            if self.is_ours and not self._is_closed:
                signal_event(self.closing_fd)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers: a fork of it must not end them."""
        return os.getpid() == self._owner_pid


def _prefixed(prefix: str, fds: Mapping[str, int]) -> dict[str, int]:
    return {prefix + name: fd for name, fd in fds.items()}


def usable_cores() -> int:
    """The cores that this process may use: the smaller of its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def worker_environment(
    user: Mapping[str, str], num_cores: int, num_workers: int, device_ids: Sequence[int] | None = None
) -> dict[str, str]:
    """Environment variables for a worker: its share of the cores, and the cache of compiled kernels; none that `user`,
    the current environment, sets already, but for the GPUs of `device_ids`, chosen among those that it shows. Raises
    `ConfigError` for one that it does not."""
    ours: dict[str, str] = {}
    if device_ids is not None:
        ours["CUDA_VISIBLE_DEVICES"] = _visible_devices(user.get("CUDA_VISIBLE_DEVICES"), device_ids)
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & user.keys():
        ours["TRITON_CACHE_DIR"] = cache_folder(user, "triton")
    num_threads = max(1, num_cores // num_workers)
    if "OMP_NUM_THREADS" not in user:
        ours["OMP_NUM_THREADS"] = str(num_threads)
    elif user["OMP_NUM_THREADS"].isdecimal():
        num_threads = int(user["OMP_NUM_THREADS"])
    if num_threads > 1 and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & user.keys():
        ours |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": GOMP_SPINCOUNT}
    if num_workers > 1 and "GLOO_SOCKET_IFNAME" not in user:
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    if num_workers > 1 and "NCCL_NVLS_ENABLE" not in user:
        # Sums in NVLink's switch: a process that dies within one can leave the switch, which all GPUs of the host
        # share, in a state that only a reset ends.
        ours["NCCL_NVLS_ENABLE"] = "0"
    return ours


def _visible_devices(shown: str | None, device_ids: Sequence[int]) -> str:
    if shown is None:
        return ",".join(map(str, device_ids))
    names = [name for name in shown.split(",") if name.strip()]
    for one in device_ids:
        if one >= len(names):
            raise ConfigError(
                f"device_ids={list(device_ids)}: CUDA_VISIBLE_DEVICES={shown!r} shows {len(names)} GPUs; give numbers "
                "below that",
                option="device_ids",
                value=list(device_ids),
            )
    return ",".join(names[one] for one in device_ids)
