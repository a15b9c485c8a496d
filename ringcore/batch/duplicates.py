"""Finds ids that occur twice among very many, in bounded memory: 128-bit hashes, sorted in runs that go to disk."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

__all__ = ["IdCheck"]

_RUN_LENGTH = 1 << 21  # ids in a run: 48 MiB


class IdCheck:
    """Two ids are the same if their hashes are: of 10^8 ids that happens by chance once in 10^22 times.

    Invariant: `_runs` are sorted by the first word of the hash, each [n, 3] uint64: two words of the hash, the line.
    """

    def __init__(self, folder: str, run_length: int = _RUN_LENGTH) -> None:
        """folder: for unnamed files, of 24 bytes an id."""
        self._folder, self._run_length = folder, run_length
        self._hashes, self._lines = bytearray(), array("Q")
        self._runs: list[np.ndarray] = []

    def add(self, custom_id: str, line: int) -> None:
        self._hashes += blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._lines.append(line)
        if len(self._lines) == self._run_length:
            self._runs.append(self._spilled(self._sorted_run()))

    def duplicates(self, limit: int) -> list[tuple[int, int]]:
        """(first line, other line) of ids that occur again: the first `limit` that are found."""
        self._runs.append(self._sorted_run())
        found: list[tuple[int, int]] = []
        for part in self._parts():
            found += _same_in(part)
            if len(found) >= limit:
                break
        return sorted(found, key=lambda pair: pair[1])[:limit]

    def _sorted_run(self) -> np.ndarray:
        words = np.frombuffer(bytes(self._hashes), dtype="<u8").reshape(-1, 2)
        run = np.column_stack([words, np.frombuffer(self._lines, dtype=np.uint64)])
        self._hashes, self._lines = bytearray(), array("Q")
        return run[np.argsort(run[:, 0], kind="stable")]

    def _spilled(self, run: np.ndarray) -> np.ndarray:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            run.tofile(file)
            file.flush()
            return np.memmap(file, dtype=np.uint64, mode="r", shape=run.shape)  # the mapping keeps the file

    def _parts(self) -> Iterator[np.ndarray]:
        """All runs together, one range of hashes after the other, each about as long as one run."""
        num_parts = max(1, sum(map(len, self._runs)) // self._run_length)
        bounds = [(2**64 * part) // num_parts for part in range(1, num_parts)]
        cuts = [
            [0, *np.searchsorted(run[:, 0], np.array(bounds, dtype=np.uint64)).tolist(), len(run)] for run in self._runs
        ]
        for part in range(num_parts):
            yield np.concatenate([run[cut[part] : cut[part + 1]] for run, cut in zip(self._runs, cuts, strict=True)])


def _same_in(part: np.ndarray) -> list[tuple[int, int]]:
    part = part[np.lexsort((part[:, 2], part[:, 1], part[:, 0]))]
    again = np.flatnonzero((part[1:, :2] == part[:-1, :2]).all(axis=1))
    return [(int(part[i, 2]), int(part[i + 1, 2])) for i in again.tolist()]
