"""What the kernel says of a process that anybody may have started."""

from __future__ import annotations

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
