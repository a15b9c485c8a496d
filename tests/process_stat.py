"""What the kernel says of a process that anybody may have started."""

from __future__ import annotations

import os
from pathlib import Path


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # it is not there; it went between opening and reading
        return None


def is_alive(pid: int) -> bool:
    """One that only waits to be reaped is not."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def children() -> list[int]:
    """Processes that this one started and has not reaped."""
    fields = {int(name): stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return [pid for pid, of_pid in fields.items() if of_pid is not None and int(of_pid[1]) == os.getpid()]


def session_members(session: int) -> list[int]:
    """The living processes of a session: whoever was started in it, also by a process that has ended."""
    found = []
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else None
        if fields is not None and fields[0] not in "ZX" and int(fields[3]) == session:
            found.append(int(name))
    return found
