"""Seconds that were measured once on this host, in files that all its processes share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["Measurements"]

_LOCK_S = 30.0  # a measurement takes less than a second; a process that is stopped amid one is not waited for longer

Seconds = Mapping[str, Sequence[float]]  # by name, of as many cases


class Measurements:
    """A file for each key. The process that needs one first measures, and the others wait for it: all have the same
    seconds. A file is written whole or not at all; one with other contents is measured again."""

    def __init__(self, folder: Path) -> None:
        """folder: of these files alone; it need not exist."""
        self._folder = folder

    def seconds(
        self, key: Mapping[str, str], names: Sequence[str], num_cases: int, measure: Callable[[], Seconds]
    ) -> Seconds | None:
        """Of `names`, `num_cases` each, as recorded for `key`, or as `measure` returns them now. None where they can be
        neither read nor recorded: nothing is measured then, since another process would not know of it."""
        path = self._folder / (hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json")
        found = _read(path, key, names, num_cases)
        if found is not None:
            return found
        try:
            with self._lock():
                found = _read(path, key, names, num_cases)
                if found is None:
                    found = measure()
                    _write(path, {"key": dict(key), "seconds": {name: list(found[name]) for name in names}})
                return found
        except OSError:  # TimeoutError is one
            return None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Held by one process of the host at a time; the kernel releases that of a dead one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_S
        with (self._folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{lock.name} is held for more than {_LOCK_S:.0f} s") from None
                    time.sleep(0.01)
            yield


def _read(path: Path, key: Mapping[str, str], names: Sequence[str], num_cases: int) -> Seconds | None:
    try:
        content = json.loads(path.read_bytes())
        if content["key"] != key:
            return None
        found = {name: [float(value) for value in content["seconds"][name]] for name in names}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_whole = all(
        len(values) == num_cases and all(0 < value < math.inf for value in values) for values in found.values()
    )
    return found if is_whole else None


def _write(path: Path, content: Mapping[str, object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
