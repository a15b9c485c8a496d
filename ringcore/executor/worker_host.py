"""The workers of one host, as an executor sees them: `NearHost`, whose processes are children of this one, and
`far.host.FarHost`, which stands for a `NearHost` in another host's agent.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError
from ringcore.executor.child_process import ChildProcess, terminate_all
from ringcore.executor.message_queue import MessageReader, MessageWriter
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.ring_memory import PAGE, unnamed_file
from ringcore.executor.status_board import RankStatus, StatusBoard, create_board
from ringcore.executor.waiting import spin_budget_s
from ringcore.executor.worker_proc import CALLS, CONTROL, RENDEZVOUS, REPLIES, STATUS, WorkerStart
from ringcore.host.cache_folder import cache_folder
from ringcore.host.page_cache import begin_reading_ahead
from ringcore.host.resources import Host
from ringcore.protocol.codec import encode_start

__all__ = [
    "CONTROL_RING_BYTES",
    "GRACE_S",
    "HostStart",
    "NearHost",
    "WorkerHost",
    "WorkerProcess",
    "heap_in_huge_pages",
    "usable_cores",
    "worker_environment",
]

ENTRY = "ringcore.executor.worker_proc:main"
CONTROL_RING_BYTES = 1 << 20
GRACE_S = 5.0
# Idle OpenMP threads spin for about as long as waking one takes (some 50 us), then sleep. Without a spin one row takes
# twice as long. A longer one takes the cores from what the threads wait for, where another process wants one of them:
# with 20,000 a product of 24 rows took 20 ms on two cores beside one busy process, 9 with 3,000, and 3 alone.
GOMP_SPINCOUNT = "3000"
_TUNABLES, _HUGE_HEAP = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


class HostStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a host needs to start its workers. host: its name in `config.parallel.layout`. rendezvous: "tcp://HOST:PORT"
    where rank 0 listens; None if all ranks are on one host, where they meet in a memfd. environment: variables of the
    workers, besides those of the process that starts them."""

    config: EngineConfig
    host: str
    factory: str
    rendezvous: str | None = None
    environment: dict[str, str] = {}

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, host in enumerate(self.config.parallel.layout.hosts) if host == self.host]


class WorkerProcess(Protocol):
    """A worker's process, here or elsewhere. See `ChildProcess`."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def signal_name(self) -> str | None: ...
    def is_alive(self) -> bool: ...
    def dead_error(self, rank: int | None = None) -> EngineDeadError: ...
    def last_log(self) -> list[str]: ...
    def signal(self, number: int) -> None: ...
    def process_state(self) -> str: ...
    def python_stacks(self, timeout_s: float = 0.5) -> str: ...


class WorkerHost(ABC):
    """The workers of one host, from construction (which starts them) to `close`.

    ranks: in order. children, replies: one each a rank. calls, control: the queues that all of them read, one for
    ordered calls and one for read-only methods. deaths: descriptors that become readable when one has ended, or the
    host is lost.
    """

    ranks: Sequence[int]
    children: Sequence[WorkerProcess]
    replies: Sequence[MessageReader]
    calls: MessageWriter
    control: MessageWriter
    deaths: Sequence[int]

    @abstractmethod
    def statuses(self) -> list[RankStatus]:
        """The status line of each rank, its times on this host's clock."""

    def hang_up(self) -> None:
        """Closes the queues, after which workers exit once they have executed the sent calls. Idempotent."""
        self.calls.close()
        self.control.close()

    @abstractmethod
    def close(self) -> None:
        """Hangs up, kills the workers that do not exit, frees everything. Idempotent. Takes at most about 5 seconds
        (and 2 after SIGTERM), for a worker that is stuck."""


class NearHost(WorkerHost):
    """Child processes of this one. Raises `CapacityError` if shared memory is short, and then frees everything."""

    def __init__(self, start: HostStart) -> None:
        self.ranks = start.ranks
        self.children: list[ChildProcess] = []
        self.replies: list[NearReader] = []
        self._cleanup = ExitStack()
        try:
            self._start(start)
        except BaseException:
            self._cleanup.close()
            raise

    def _start(self, start: HostStart) -> None:
        # While the workers import torch.
        begin_reading_ahead(start.config.model.files.weight_files, Host().free_memory_bytes())
        # Callbacks run in reverse order: the queues are closed, the processes end, then the rest is freed.
        parallel, num_workers = start.config.parallel, len(self.ranks)
        environment = _environment(start, num_workers)
        spin_s = spin_budget_s(1 + num_workers)
        large = parallel.large_messages
        calls = self._queue(parallel.call_ring_bytes, num_workers, large)
        control = self._queue(CONTROL_RING_BYTES, num_workers, large)
        replies = [self._queue(parallel.reply_ring_bytes, 1, large) for _ in self.ranks]
        status_fd = create_board(num_workers)
        self._cleanup.callback(os.close, status_fd)
        shared = {STATUS: status_fd}
        if num_workers > 1 and start.rendezvous is None:
            shared[RENDEZVOUS] = unnamed_file("rendezvous")
            self._cleanup.callback(os.close, shared[RENDEZVOUS])
        self.board = StatusBoard(status_fd, num_workers)
        self._cleanup.callback(lambda: terminate_all(self.children, GRACE_S))
        self.calls, self.control = NearWriter(calls), NearWriter(control)
        self._cleanup.callback(self.hang_up)
        for index, (rank, queue) in enumerate(zip(self.ranks, replies, strict=True)):
            worker = WorkerStart(start.config, rank, start.factory, spin_s, start.rendezvous)
            fds = (
                _prefixed(CALLS, calls.fds_of_reader(index))
                | _prefixed(CONTROL, control.fds_of_reader(index))
                | _prefixed(REPLIES, queue.fds_of_writer())
                | shared
            )
            child = ChildProcess.start(f"worker {rank}", ENTRY, encode_start(worker), fds, environment)
            self.children.append(child)
            reader = NearReader(queue, 0, [child.pidfd], spin_s)
            self._cleanup.callback(reader.close)
            self.replies.append(reader)
            queue.close_sending()
        calls.close_receiving()
        control.close_receiving()
        self.deaths = [child.pidfd for child in self.children]

    def _queue(self, num_bytes: int, num_readers: int, large_messages: str) -> QueueHandle:
        queue = create_queue(-(-num_bytes // PAGE) * PAGE, num_readers, large_messages)
        self._cleanup.callback(queue.close)
        return queue

    def statuses(self) -> list[RankStatus]:
        return [self.board.read(index) for index in range(len(self.children))]

    def close(self) -> None:
        self._cleanup.close()


def _prefixed(prefix: str, fds: Mapping[str, int]) -> dict[str, int]:
    return {prefix + name: fd for name, fd in fds.items()}


def _environment(start: HostStart, num_workers: int) -> dict[str, str]:
    """Of this host's workers."""
    ids = start.config.device.device_ids
    own = None if ids is None else [ids[rank] for rank in start.ranks]
    is_one_host = start.rendezvous is None
    given = os.environ | start.environment
    ours = worker_environment(given, usable_cores(), num_workers, own, is_one_host=is_one_host)
    device = start.config.device.device
    if device == "cpu" or (device == "auto" and not Host().has_gpu()):
        ours |= heap_in_huge_pages(given)
    return start.environment | ours


def heap_in_huge_pages(user: Mapping[str, str]) -> dict[str, str]:
    """The variable by which glibc's malloc asks for huge pages, unless `user`, the environment, says whether it does.

    The weights that a library packs are there, and reading 4 KiB pages in a row takes longer.
    """
    given = user.get(_TUNABLES, "")
    return {} if _HUGE_HEAP in given else {_TUNABLES: ":".join(filter(None, (given, f"{_HUGE_HEAP}=1")))}


def usable_cores() -> int:
    """The cores that this process may use: the smaller of its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def worker_environment(
    user: Mapping[str, str],
    num_cores: int,
    num_workers: int,
    device_ids: Sequence[int] | None = None,
    is_one_host: bool = True,
) -> dict[str, str]:
    """Environment variables for a worker: its share of the cores, and the cache of compiled kernels; none that `user`,
    the current environment, sets already, but for the GPUs of `device_ids`, chosen among those that it shows. Raises
    `ConfigError` for one that it does not. num_workers: of this host; is_one_host: there are no others."""
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
    if num_workers > 1 and is_one_host and "GLOO_SOCKET_IFNAME" not in user:
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
