"""What /proc and /dev/shm tell about processes, their threads, descriptors and memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from process_stat import children


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def shared_memory_names() -> set[str]:
    """Names in /dev/shm, but for those that a living process has mapped: they are of a program beside the tests."""
    names = set(os.listdir("/dev/shm"))
    return names - _mapped_shared_memory() if names else names


def _mapped_shared_memory() -> set[str]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                maps = Path(f"/proc/{name}/maps").read_text()
            except OSError:
                continue
            found.update(line.rsplit("/dev/shm/", 1)[1] for line in maps.splitlines() if "/dev/shm/" in line)
    return found


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def descriptors(pid: int | str = "self") -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
    return found


def status_kb(field: str, pid: int | str = "self") -> int:
    """A field of /proc/PID/status that is in kB, e.g. RssAnon."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


class Census:
    """What this process holds, to compare two moments."""

    def __init__(self) -> None:
        self.descriptors = descriptors()
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.children = children()
        self.shared_memory = shared_memory_names()

    def grown_since(self, before: Census) -> list[str]:
        """What there is more of than `before`, in words; empty where nothing is."""
        found = []
        if len(self.descriptors) > len(before.descriptors):
            new = {fd: what for fd, what in self.descriptors.items() if before.descriptors.get(fd) != what}
            found.append(f"{len(self.descriptors) - len(before.descriptors)} descriptors, of {new}")
        if len(self.threads) > len(before.threads):
            found.append(f"threads {self.threads}, before {before.threads}")
        if len(self.children) > len(before.children):
            found.append(f"processes {self.children}, before {before.children}")
        if self.shared_memory - before.shared_memory:
            found.append(f"shared memory {self.shared_memory - before.shared_memory}")
        return found
