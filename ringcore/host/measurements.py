"""What was measured once on this host, in files that all its processes share."""

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
from typing import Any, TypeVar

__all__ = ["Measurements", "Seconds"]

_LOCK_S = 30.0  # a measurement takes less than a second; a process that is stopped amid one is not waited for longer

Seconds = Mapping[str, Sequence[float]]  # by name, of as many cases
_Found = TypeVar("_Found")
Decode = Callable[[Any], _Found]  # of what JSON gave; raises ValueError, TypeError or KeyError for anything else


class Measurements:
    """A file for each key. The process that needs one first measures, and the others wait for it: all find the same. A
    file is written whole or not at all; one with other contents is measured again."""

    def __init__(self, folder: Path, lock_s: float = _LOCK_S) -> None:
        """folder: of these files alone; it need not exist. lock_s: how long another process is waited for."""
        self._folder, self._lock_s = folder, lock_s

    def seconds(
        self, key: Mapping[str, str], names: Sequence[str], num_cases: int, measure: Callable[[], Seconds]
    ) -> Seconds | None:
        """Of `names`, `num_cases` each, as recorded for `key`, or as `measure` returns them now. None where they can be
        neither read nor recorded: nothing is measured then, since another process would not know of it."""

        def decode(content: Any) -> Seconds:
            found = {name: [float(value) for value in content[name]] for name in names}
            if not all(len(each) == num_cases and all(0 < t < math.inf for t in each) for each in found.values()):
                raise ValueError(content)
            return found

        def encode(found: Seconds) -> Any:
            return {name: list(found[name]) for name in names}

        return self.recorded(key, "seconds", decode, encode, measure)

    def recorded(
        self,
        key: Mapping[str, str],
        what: str,
        decode: Decode[_Found],
        encode: Callable[[_Found], Any],
        measure: Callable[[], _Found],
    ) -> _Found | None:
        """What is recorded for `key` under the name `what`, or what `measure` finds now, as `seconds`."""
        found = self.read(key, what, decode)
        if found is not None:
            return found
        try:
            with self._lock():
                found = self.read(key, what, decode)
                if found is None:
                    found = measure()
                    _write(self._path(key), {"key": dict(key), what: encode(found)})
                return found
        except OSError:  # TimeoutError is one
            return None

    def read(self, key: Mapping[str, str], what: str, decode: Decode[_Found]) -> _Found | None:
        """What is recorded for `key`; None where there is nothing, or something else."""
        try:
            content = json.loads(self._path(key).read_bytes())
            return decode(content[what]) if content["key"] == key else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, key: Mapping[str, str], what: str, content: Any) -> None:
        """Records `content`, of which JSON can be made, for `key` in place of what was. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._path(key), {"key": dict(key), what: content})

    def exists(self, key: Mapping[str, str]) -> bool:
        """Whether there is a file for `key`, whatever it holds."""
        return self._path(key).exists()

    def can_record(self) -> bool:
        """Whether the folder can be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "lock").open("a").close()
        except OSError:
            return False
        return True

    def newest(self) -> tuple[int, float]:
        """(How many files there are, when the newest was written, in seconds since 1970.)"""
        times = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return len(times), max(times, default=0.0)

    def _path(self, key: Mapping[str, str]) -> Path:
        return self._folder / (hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Held by one process of the host at a time; the kernel releases that of a dead one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._lock_s
        with (self._folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{lock.name} is held for more than {self._lock_s:.0f} s") from None
                    time.sleep(0.01)
            yield


def _write(path: Path, content: Mapping[str, object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
