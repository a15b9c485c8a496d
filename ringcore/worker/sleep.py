"""Sleep and wake: frees and restores the memory of a rank's weights and KV cache under fixed addresses, in two
phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.host.byte_sizes import format_bytes
from ringcore.host.resources import Host
from ringcore.worker.memory.arena import Arena, PieceUse
from ringcore.worker.memory.file_store import FileStore
from ringcore.worker.memory.host_store import HostBudget, HostStore, MemoryStore
from ringcore.worker.platforms.platform import Platform

__all__ = ["RESIDENT", "RankMemory", "begin_host_store"]

RESIDENT, OFFLOADED, DISCARDED = "resident", "offloaded", "discarded"

# In mapping order: weights first, since their pieces are copied as soon as they are mapped, while the rest is being
# mapped.
_STATES: Mapping[str, tuple[str, ...]] = {
    "weights": (RESIDENT, OFFLOADED, DISCARDED),
    "kv_cache": (RESIDENT, DISCARDED),
}


class RankMemory:
    """The arenas of a rank by tag, and the state of each.

    state      | its arena | the host store
    resident   | mapped    | empty
    offloaded  | unmapped  | the contents; weights only
    discarded  | unmapped  | empty

    A change has two phases. `prepare` does everything that can run out of memory, and loses no contents: an arena that
    is to be unmapped stays mapped, and a host copy that is no longer needed is kept. Then `commit` frees them, or
    `roll_back` frees what `prepare` allocated.
    """

    def __init__(self, platform: Platform, store: HostStore) -> None:
        """store: of the size of the weights; the caller closes it, and the platform its arenas."""
        self._platform, self._store = platform, store
        self._arenas: Mapping[str, Arena] = platform.arenas
        assert self._arenas.keys() >= _STATES.keys(), sorted(self._arenas)
        # Replaced, never mutated: the side thread reads it.
        self._states: Mapping[str, str] = dict.fromkeys(_STATES, RESIDENT)
        self._changes: dict[str, str] | None = None  # the prepared change by tag; None: none

    @property
    def states(self) -> dict[str, str]:
        """The committed states by tag."""
        return dict(self._states)

    @property
    def is_resident(self) -> bool:
        """Whether every tag is resident, and no change is prepared."""
        return self._changes is None and all(state == RESIDENT for state in self._states.values())

    def prepare(self, target: Mapping[str, str]) -> dict[str, float]:
        """Copies and maps what the states of `target` need; -> those that apply of "copied_bytes", "copy_s",
        "mapped_bytes", "map_s", its parts "weights_map_s" and "kv_cache_map_s", and "host_store_s" (the wait for the
        host store's memory).

        A mapped arena holds its restored contents, zeros for the KV cache, or arbitrary bytes for discarded weights.
        "map_s" is the time of mapping alone; "copy_s" is from the start of the first copy to the end of the last.
        Copies and mapping overlap, so their sum may exceed the elapsed time.

        Raises `CapacityError` with the bytes needed and free; on any error nothing has changed.
        """
        assert self._changes is None, "a change is prepared already"
        changes = self._check(target)
        self._changes = changes
        report: dict[str, float] = {}
        try:
            self._platform.synchronize()  # steps may still write
            if changes.get("weights") == OFFLOADED:
                self._save(report)
            self._map([tag for tag in _STATES if changes.get(tag) == RESIDENT], report)
        except BaseException:
            self.roll_back()
            raise
        return report

    def _check(self, target: Mapping[str, str]) -> dict[str, str]:
        """Checks the target; -> the tags whose state changes."""
        for tag, state in target.items():
            if tag not in _STATES or state not in _STATES[tag]:
                known = ", ".join(f"{tag}: {' or '.join(states)}" for tag, states in _STATES.items())
                raise InvalidRequestError(
                    f"target: {tag!r} cannot be {state!r}; give {known}", field="target", value=f"{tag}: {state}"
                )
            if state == OFFLOADED and self._states[tag] == DISCARDED:
                raise InvalidRequestError(
                    f"target: {tag!r} are discarded, there is nothing to offload; wake up first, and load them",
                    field="target",
                    value=f"{tag}: {state}",
                )
        return {tag: state for tag, state in target.items() if state != self._states[tag]}

    def _save(self, report: dict[str, float]) -> None:
        with _timed(report, "host_store_s"):
            self._store.ready()
        contents = self._arenas["weights"].contents()
        with _timed(report, "copy_s"):
            self._store.save(contents)
            self._store.finish()
        _add(report, "copied_bytes", len(contents))

    def _map(self, tags: list[str], report: dict[str, float]) -> None:
        copying_since: float | None = None

        def restore(part: torch.Tensor, at: int) -> None:
            nonlocal copying_since
            if copying_since is None:
                copying_since = time.monotonic()
            self._store.restore(part, at)
            _add(report, "copied_bytes", len(part))

        def clear(part: torch.Tensor, at: int) -> None:
            self._platform.clear_new(part)

        for tag in tags:
            fill = restore if self._states[tag] == OFFLOADED else clear if tag == "kv_cache" else None
            self._map_arena(tag, fill, report)
        if copying_since is not None:
            self._store.finish()
            _add(report, "copy_s", time.monotonic() - copying_since)
        if tags:
            self._platform.synchronize()

    def _map_arena(self, tag: str, fill: PieceUse | None, report: dict[str, float]) -> None:
        arena, filling = self._arenas[tag], {"s": 0.0}

        def timed_fill(part: torch.Tensor, at: int) -> None:
            if fill is not None:
                with _timed(filling, "s"):
                    fill(part, at)

        started = time.monotonic()
        self._try_to_map(tag, timed_fill, int(report.get("mapped_bytes", 0)))
        map_s = time.monotonic() - started - filling["s"]
        _add(report, "mapped_bytes", arena.mapped_bytes)
        _add(report, "map_s", map_s)
        report[f"{tag}_map_s"] = map_s

    def _try_to_map(self, tag: str, fill: PieceUse, taken: int) -> None:
        """taken: bytes that this change has already mapped."""
        try:
            self._arenas[tag].map(fill)
        except CapacityError as error:
            if not taken:
                raise
            details = {name: error.details[name] + taken for name in ("needed_bytes", "available_bytes")}
            raise CapacityError(f"{error.message}; the other tags took {format_bytes(taken)}", **details) from error

    def commit(self) -> dict[str, float]:
        """Commits the prepared change; -> "weights_freed_bytes" and "kv_cache_freed_bytes" of the unmapped tags, and
        "unmap_s"; if any was unmapped, also "cached_freed_bytes" of the allocators and "cached_s", and "residue_bytes",
        the device memory that this process still uses, where that is known, and "residue_s"."""
        assert self._changes is not None, "no change is prepared"
        report: dict[str, float] = {}
        for tag in self._changes:
            if self._states[tag] == RESIDENT:
                before = self._arenas[tag].mapped_bytes
                with _timed(report, "unmap_s"):
                    self._arenas[tag].unmap()
                report[f"{tag}_freed_bytes"] = before - self._arenas[tag].mapped_bytes
            elif self._states[tag] == OFFLOADED:
                self._store.drop()
        if report:
            with _timed(report, "cached_s"):
                report["cached_freed_bytes"] = self._platform.release_cached()
            with _timed(report, "residue_s"):
                residue = self._platform.process_memory()
            if residue is not None:
                report["residue_bytes"] = residue.own_bytes
        self._states, self._changes = {**self._states, **self._changes}, None
        return report

    def roll_back(self) -> None:
        """Undoes `prepare`. A no-op where nothing is prepared."""
        changes, self._changes = self._changes, None
        for tag, state in (changes or {}).items():
            if state == RESIDENT:
                self._arenas[tag].unmap()  # waits for copies first
            elif state == OFFLOADED:
                self._store.drop()


def begin_host_store(platform: Platform, directory: str | None, num_ranks: int) -> HostStore:
    """Creates the host store of the weights, whose memory is then allocated in the background. Called when the weights
    are allocated, before they are read.

    directory: of a file store; None: host memory. num_ranks: of this host.
    """
    num_bytes, link = platform.arenas["weights"].used_bytes, platform.host_link()
    store: HostStore
    if directory is None:
        store = MemoryStore(num_bytes, link, HostBudget(Host().free_memory_bytes, num_ranks))
    else:
        store = FileStore(num_bytes, directory, link)
    store.allocate_in_background()
    return store


@contextmanager
def _timed(report: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds to the report."""
    started = time.monotonic()
    yield
    _add(report, name, time.monotonic() - started)


def _add(report: dict[str, float], name: str, value: float) -> None:
    report[name] = report.get(name, 0) + value
