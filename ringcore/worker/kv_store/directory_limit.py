"""The size of a directory of blocks that several engines share: the files that were used least recently make room."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["SUFFIX", "TEMPORARY", "DirectoryLimit"]

SUFFIX, TEMPORARY = ".kv", ".tmp"
_STALE_NS = 3600 * 10**9  # a temporary file that is so much older than others has no writer any more

# directory / of a model and its options / of a rank / a block
_OF_MODEL = re.compile("[0-9a-f]{64}")
_OF_BLOCK = re.compile(f"[0-9a-f]+{re.escape(SUFFIX)}")


class DirectoryLimit:
    """Keeps all blocks of `root`, of every engine and model, within `max_bytes`. Nothing else is removed there.

    Each writer sweeps after every sixteenth of its share of the limit, down to seven eighths, so that two engines that
    write at the same time stay within it; more may be over it by a sixteenth each, until the next sweep. Engines agree
    on nothing: a file's time of change says when any of them used it last, and a block that another engine has removed
    is a miss. num_writers: of this engine.
    """

    def __init__(self, root: Path, max_bytes: int, num_writers: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._step_bytes = max(max_bytes // (16 * num_writers), 1)
        self._written_bytes = 0  # since the last sweep

    def note(self, num_bytes: int) -> bool:
        """A file was written; whether a sweep is due."""
        self._written_bytes += num_bytes
        is_due = self._written_bytes >= self._step_bytes
        if is_due:
            self._written_bytes = 0
        return is_due

    def sweep(self) -> None:
        """Raises OSError if the directory cannot be read."""
        found = [(stat.st_mtime_ns, stat.st_size, path) for path, stat in self._files()]
        excess = sum(size for _, size, _ in found) - self._max_bytes
        if excess <= 0:
            return
        excess += self._max_bytes // 8
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            with suppress(OSError):  # another engine has removed it
                os.unlink(path)
            excess -= size

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """The blocks. Removes what writers that died have left: files much older than the newest one."""
        unfinished, newest_ns = [], 0
        for of_model in _folders(self._root):
            if not _OF_MODEL.fullmatch(of_model.name):
                continue
            for of_rank in _folders(of_model):
                with suppress(OSError), os.scandir(of_rank) as entries:
                    for entry in entries:
                        with suppress(OSError):
                            stat = entry.stat(follow_symlinks=False)
                            if _OF_BLOCK.fullmatch(entry.name):
                                newest_ns = max(newest_ns, stat.st_mtime_ns)
                                yield entry.path, stat
                            elif entry.name.endswith(TEMPORARY):
                                newest_ns = max(newest_ns, stat.st_mtime_ns)
                                unfinished.append((stat.st_mtime_ns, entry.path))
        for written_ns, path in unfinished:
            if written_ns < newest_ns - _STALE_NS:
                with suppress(OSError):
                    os.unlink(path)


def _folders(path: str | Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
