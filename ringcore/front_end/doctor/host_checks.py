"""Checks of the host: processors, memory, limits, system calls, the port of the service, the caches."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psutil

from ringcore.engine_core.admin.listener import ADMIN_LIMITS
from ringcore.engine_core.admin.local_listener import LocalListener
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.executor.ring_memory import FALLBACK_DIRECTORY, HAS_MEMFD, SEALS, seal, shared_memory
from ringcore.front_end.local_connection import connect
from ringcore.front_end.parking.offers import host_bytes, offers
from ringcore.host.byte_sizes import format_bytes
from ringcore.host.cache_folder import TILES, our_cache_folder
from ringcore.host.measurements import Measurements
from ringcore.host.resources import Host
from ringcore.protocol.finding import Finding

__all__ = [
    "check_caches",
    "check_driver",
    "check_limits",
    "check_memory",
    "check_parked",
    "check_port",
    "check_processors",
    "check_shared_memory",
    "check_system_calls",
]

PORT = 8000  # of `ringcore serve`
_MIN_FILES = 4096
_MIN_MEMORY_BYTES = 2 << 30
_MIN_DISK_BYTES = 10 << 30
_RINGS_BYTES = 128 << 20  # the shared memory of an engine with a few ranks


def check_processors(cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    usable, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {all_} usable" if usable < all_ else f"{all_}"
    quota = _quota(cgroups)
    if quota is not None and quota < usable:
        found += f", and a limit of {quota:g} by the cgroup: threads beyond it only wait"
        yield Finding("processors", "warning", found, f"OMP_NUM_THREADS={max(1, int(quota))}, or a higher limit")
    else:
        yield Finding("processors", "ok", found)


def _quota(cgroups: Path) -> float | None:
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max"; or another version of cgroups
        return None


def check_memory(host: Host | None = None) -> Iterator[Finding]:
    host = host or Host()
    total, free = host.total_memory_bytes(), host.free_memory_bytes()
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    if total < psutil.virtual_memory().total:
        found += f", by the cgroup; the machine has {format_bytes(psutil.virtual_memory().total)}"
    if free < _MIN_MEMORY_BYTES:
        yield Finding("memory", "warning", found, "a smaller model, a smaller kv_cache_bytes, or a higher limit")
    else:
        yield Finding("memory", "ok", found)


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        mend = f"ulimit -n {_MIN_FILES if hard == resource.RLIM_INFINITY else min(_MIN_FILES, hard)}"
        yield Finding("limits", "warning", f"{soft} open files (at most {hard}): each connection is one", mend)
    else:
        yield Finding("limits", "ok", f"{_limit(soft)} open files")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "any amount of" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    yield Finding("limits", "ok", f"{shown} locked memory; memory that a CUDA driver pins does not count")
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield Finding("limits", "ok", f"{_limit(processes)} processes and threads of this user")


def _limit(value: int) -> str:
    return "no limit of" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory() -> Iterator[Finding]:
    """As the rings of an engine allocate it."""
    fd = shared_memory("doctor", _RINGS_BYTES)
    try:
        seal(fd, SEALS)
    finally:
        os.close(fd)
    size = shutil.disk_usage(FALLBACK_DIRECTORY) if os.path.isdir(FALLBACK_DIRECTORY) else None
    shown = f"{FALLBACK_DIRECTORY} has {format_bytes(size.free)} free" if size else f"no {FALLBACK_DIRECTORY}"
    if HAS_MEMFD:
        yield Finding("shared memory", "ok", f"sealed memfds; {shown}")
    else:
        mend = "a container that allows memfd_create: a newer runtime, or another seccomp profile"
        yield Finding("shared memory", "warning", f"no memfd_create: files in {FALLBACK_DIRECTORY}, {shown}", mend)


def check_system_calls() -> Iterator[Finding]:
    """Those that a sandbox may forbid; without some of them no engine starts."""
    for name, try_, is_needed, what in _SYSTEM_CALLS:
        try:
            try_()
        except (OSError, AttributeError, ValueError) as error:
            mend = "a kernel from 5.3 on, and a seccomp profile that allows it (--security-opt seccomp=PROFILE)"
            yield Finding("system calls", "error" if is_needed else "warning", f"{name}: {error}; {what}", mend)
        else:
            yield Finding("system calls", "ok", name)


def _try_pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)


def _try_eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def _try_signal_io() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)  # no O_ASYNC: nothing is sent
    finally:
        os.close(read)
        os.close(write)


def _try_fd_passing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [ours.fileno()])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            os.close(fd)


def _try_local_admin() -> None:
    name = LocalName(os.geteuid(), os.getpid(), os.urandom(4).hex())
    with closing(LocalListener(name, ADMIN_LIMITS)), connect(name):
        os.readlink("/proc/self/fd/0" if os.path.lexists("/proc/self/fd/0") else "/proc/self/exe")


_SYSTEM_CALLS: tuple[tuple[str, Callable[[], None], bool, str], ...] = (
    ("pidfd_open and pidfd_send_signal", _try_pidfd, True, "the deaths of processes are noticed by it"),
    ("eventfd", _try_eventfd, True, "processes wake each other by it"),
    ("passing descriptors", _try_fd_passing, True, "large messages travel so"),
    ("signal-driven I/O", _try_signal_io, False, "a worker in a hung C call may outlive its engine"),
    ("abstract sockets and /proc", _try_local_admin, False, "'ringcore ps' and 'ringcore rpc' do not find engines"),
)


def check_port(port: int = PORT) -> Iterator[Finding]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            mend = f"ringcore serve --port {port + 1}, or find the owner by ss -ltnp 'sport = :{port}'"
            yield Finding("port", "warning", f"{port}: {error.strerror}", mend)
        else:
            yield Finding("port", "ok", f"{port} is free")


def check_driver(proc: Path = Path("/proc")) -> Iterator[Finding]:
    try:
        (line, *_) = (proc / "driver/nvidia/version").read_text().splitlines()
    except (OSError, ValueError):
        yield Finding("GPU driver", "ok", "none of NVIDIA is loaded: models run on the CPU")
    else:
        yield Finding("GPU driver", "ok", line.removeprefix("NVRM version:").strip())


def check_parked() -> Iterator[Finding]:
    """The memory of parked engines, which serve no requests."""
    found = list(offers())
    if not found:
        yield Finding("parked engines", "ok", "none of this user")
    for offer in found:
        held = "all of its device memory" if offer.level == 0 else "nearly none of a GPU's memory"
        text = f"{len(offer.pids)} of {offer.model}, kept by process {offer.pid}: {format_bytes(host_bytes(offer))} of "
        text += f"host memory; at level {offer.level} each holds {held}"
        if offer.error is not None:
            yield Finding("parked engines", "warning", f"{text}; the last start failed: {offer.error}", "ringcore park")
        else:
            yield Finding("parked engines", "ok", f"{text}; 'ringcore park --stop' ends them")


def check_caches() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE  # imports much

    models = list(Path(HF_HUB_CACHE).glob("models--*"))
    yield _cache("model cache", Path(HF_HUB_CACHE), f"{len(models)} models of the hub in {HF_HUB_CACHE}", "HF_HOME")
    ours = Path(our_cache_folder("folders")).parent
    yield _cache("own cache", ours, str(ours), "XDG_CACHE_HOME")
    count, newest = Measurements(ours / TILES).newest()
    when = f", the last of them on {datetime.fromtimestamp(newest, UTC):%Y-%m-%d}" if count else ""
    yield Finding("kernel tuning", "ok", f"{count} shapes searched by kernel_autotune{when}")


def _cache(check: str, folder: Path, found: str, variable: str) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    found += f", {format_bytes(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(check, "error", f"{found}; this user cannot write there", f"export {variable}=FOLDER")
    if free < _MIN_DISK_BYTES:
        return Finding(check, "warning", found, f"free space, or export {variable}=FOLDER on another disk")
    return Finding(check, "ok", found)
