"""The ring's real code, run one access to shared memory at a time.

`load_ring` executes the source of `ringcore/executor/ring_buffer.py` (changed, for a mutant) as a module of its own.
`RingCode` lets its `RingWriter` and `RingReader` map proxies in place of memory: each load, store, fence and event
write of theirs ends in `Port.access`. An operation (one call of a method) is then a function of the results of its
accesses: to go one access further it is run again from its beginning with the results so far, and stopped at the next.

What depends on the inside of `ring_buffer` is all in this file: the names of the words, of `RingMapping`, `make_fence`,
`signal_event` and `time`, and that records go through `struct.Struct` objects and slices of `_data`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ringcore.executor.ring_buffer as real_ring

__all__ = ["LINE", "Access", "Do", "Layout", "Paused", "Port", "RingCode", "View", "load_ring", "ring_source"]

LINE = real_ring.LINE

Access = tuple[Any, ...]


class Do:
    """The kinds of accesses. An access is a tuple of its kind and of what stands beside it here."""

    LOAD = "load"  # place; the result is the word
    STORE = "store"  # place, word
    LOAD_LINE = "load line"  # place, begin, end; the result is these bytes of the line
    STORE_LINE = "store line"  # place, begin, bytes
    CHECK = "check"  # place, begin, bytes that a receiver of a message must find there
    FENCE = "fence"
    SIGNAL = "signal"  # event: an eventfd is written
    WAIT = "wait"  # event: sleeps until it is signalled, and drains it
    SLEEP = "sleep"  # event: sleeps until it is signalled or for a tick, and drains it
    CHOOSE = "choose"  # n: what no memory decides; the result is one of range(n)


class Paused(BaseException):
    """The operation wants an access whose result is not known yet. No handler of the ring's code may catch it."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self.access = access


class Port:
    """Where the code under test meets shared memory: recorded results first, then a stop."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._results: tuple[Any, ...] | None = None
        self._used = 0

    def replay(self, results: tuple[Any, ...]) -> None:
        self._results, self._used = results, 0

    def access(self, *access: Any) -> Any:
        if self._results is None:
            assert access[0] == Do.LOAD  # a constructor looks, it changes nothing
            return self._layout.fresh_cells[access[1]]
        if self._used == len(self._results):
            raise Paused(access)
        self._used += 1
        return self._results[self._used - 1]

    # What operations do besides calling the ring.

    def check(self, view: View, expected: bytes) -> None:
        for place, begin, end, at in lines_of(view.start, view.length):
            self.access(Do.CHECK, place, begin, expected[at : at + end - begin])

    def wait(self, event: int) -> None:
        self.access(Do.WAIT, event)

    def sleep(self, event: int) -> None:
        self.access(Do.SLEEP, event)

    def choose(self, num: int) -> int:
        return self.access(Do.CHOOSE, num)


def lines_of(start: int, length: int) -> list[tuple[int, int, int, int]]:
    """The lines that `length` bytes from `start` touch: line, begin and end in it, bytes before it."""
    found, at = [], 0
    while at < length:
        line, begin = divmod(start + at, LINE)
        num_bytes = min(LINE - begin, length - at)
        found.append((line, begin, begin + num_bytes, at))
        at += num_bytes
    return found


class Layout:
    """Names each place of shared memory by a number: the data's lines first, then the words in use.

    start: head and tails of the ring when the model begins, in bytes.
    """

    def __init__(self, ring: ModuleType, num_lines: int, num_readers: int, start: int) -> None:
        self.num_lines, self.num_readers = num_lines, num_readers
        words = [(-1, word) for word in (ring._HEAD, ring._CLOSED, ring._SPACE_WANTED)]
        for reader in range(num_readers):
            words += [(reader, ring._TAIL), (reader, ring._READER_CLOSED)]
        self._places = {word: num_lines + i for i, word in enumerate(words)}
        self._first_ack = self._places[0, ring._TAIL]
        self.num_places = num_lines + len(words)
        self.head = self._places[-1, ring._HEAD]
        self.tails = [self._places[i, ring._TAIL] for i in range(num_readers)]
        cells: list[int | bytes] = [bytes(LINE)] * num_lines + [0] * len(words)
        for place in (self.head, *self.tails):
            cells[place] = start
        self.fresh_cells = tuple(cells)
        self.names = [f"data line {i}" for i in range(num_lines)] + ["head", "closed", "space_wanted"]
        for reader in range(num_readers):
            self.names += [f"tail of reader {reader}", f"closed of reader {reader}"]

    def place(self, page: int, word: int) -> int:
        """The number of a word of the control page (page -1) or of a reader's page."""
        return self._places[page, word]

    def owner(self, place: int) -> int:
        """Who stores it: the writer is 0, reader i is 1 + i."""
        return 0 if place < self._first_ack else 1 + (place - self._first_ack) // 2

    def loaders(self, place: int) -> list[int]:
        """Who loads it and does not store it."""
        return [1 + i for i in range(self.num_readers)] if place < self._first_ack else [0]

    def partner(self, access: Access) -> int | None:
        """The one reader whose steps matter to this access of the writer's; None where it is not one alone."""
        kind, *beside = access
        if kind == Do.SIGNAL:
            return beside[0]
        if kind == Do.LOAD and beside[0] >= self._first_ack:
            return (beside[0] - self._first_ack) // 2
        return None


class Words:
    """Stands for a `memoryview.cast("Q")` of a page."""

    def __init__(self, port: Port, layout: Layout, page: int, writable: bool) -> None:
        self._port, self._layout, self._page, self._writable = port, layout, page, writable

    def __getitem__(self, word: int) -> int:
        return self._port.access(Do.LOAD, self._layout.place(self._page, word))

    def __setitem__(self, word: int, value: int) -> None:
        assert self._writable
        self._port.access(Do.STORE, self._layout.place(self._page, word), value)


@dataclass(frozen=True)
class View:
    """Stands for a part of a received record: nothing is loaded before somebody looks."""

    start: int
    length: int

    def __len__(self) -> int:
        return self.length


class Data:
    """Stands for the memoryview of the ring's bytes."""

    def __init__(self, port: Port, capacity: int, writable: bool) -> None:
        self._port, self._capacity, self._writable = port, capacity, writable

    def __len__(self) -> int:
        return self._capacity

    def __getitem__(self, where: slice) -> View:
        start, stop, _ = where.indices(self._capacity)
        return View(start, max(0, stop - start))

    def __setitem__(self, where: slice, value: bytes) -> None:
        assert 0 <= where.start <= where.stop <= self._capacity
        assert where.stop - where.start == len(value)
        self.store(where.start, bytes(value))

    def load(self, start: int, length: int) -> bytes:
        pieces = [self._port.access(Do.LOAD_LINE, line, begin, end) for line, begin, end, _ in lines_of(start, length)]
        return b"".join(pieces)

    def store(self, start: int, value: bytes) -> None:
        assert self._writable
        assert start + len(value) <= self._capacity, f"a store of {len(value)} bytes at {start} leaves the ring"
        for line, begin, end, at in lines_of(start, len(value)):
            self._port.access(Do.STORE_LINE, line, begin, value[at : at + end - begin])


class Record:
    """Stands for a `struct.Struct` that packs into, and unpacks from, the ring's bytes."""

    def __init__(self, record: struct.Struct) -> None:
        self._record, self.size = record, record.size

    def pack_into(self, data: Data, offset: int, *values: Any) -> None:
        data.store(offset, self._record.pack(*values))

    def unpack_from(self, data: Data, offset: int = 0) -> tuple[Any, ...]:
        assert offset + self.size <= len(data), "a header is read past the end of the ring"
        return self._record.unpack(data.load(offset, self.size))


def ring_source() -> str:
    return Path(real_ring.__file__).read_text()


class _Source(importlib.abc.SourceLoader):
    def __init__(self, text: str) -> None:
        self._text = text

    def get_filename(self, fullname: str) -> str:
        return real_ring.__file__

    def get_data(self, path: str) -> bytes:
        if path != real_ring.__file__:
            raise OSError(path)  # no compiled file: a mutant must neither find one nor leave one
        return self._text.encode()


def load_ring(source: str | None = None) -> ModuleType:
    """The ring's module from this source, apart from the one that everybody imports."""
    loader = _Source(ring_source() if source is None else source)
    spec = importlib.util.spec_from_loader("ring_under_test", loader)
    assert spec is not None
    ring = importlib.util.module_from_spec(spec)
    loader.exec_module(ring)
    return ring


def _with_proxies(value: Any) -> Any:
    """A module's constant with every `Struct` in it replaced."""
    if isinstance(value, struct.Struct):
        return Record(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_with_proxies, value))
    return value


class Mapping:
    """Stands for a `RingMapping`."""

    def __init__(self, port: Port, layout: Layout, capacity: int, is_writer: bool) -> None:
        self._port, self._layout = port, layout
        self.words = Words(port, layout, -1, writable=is_writer)
        self.data = Data(port, capacity, writable=is_writer)
        self.capacity, self.num_readers = capacity, layout.num_readers

    def map_ack(self, handle: Any, index: int, is_reader: bool) -> Words:
        return Words(self._port, self._layout, index, writable=is_reader)

    def close(self) -> None:
        """Leaves nothing to access: the proxies stay, and the code under test must not touch them."""


class RingCode:
    """A writer and its readers over proxies. Events: i wakes reader i, `num_readers` wakes the writer.

    has_fence: whether the code runs as on a machine that reorders, that is with a fence.
    """

    def __init__(self, ring: ModuleType, layout: Layout, has_fence: bool, restart_bytes: int) -> None:
        self.ring, self.layout, self.port = ring, layout, Port(layout)
        self.capacity, num_readers = layout.num_lines * LINE, layout.num_readers
        self.space_event = num_readers
        for name, value in list(vars(ring).items()):
            if isinstance(value, struct.Struct | list | tuple):
                setattr(ring, name, _with_proxies(value))
        ring.RESTART_BYTES = restart_bytes
        ring.RingMapping = self._map
        ring.make_fence = lambda: (lambda: self.port.access(Do.FENCE)) if has_fence else None
        ring.signal_event = lambda event: self.port.access(Do.SIGNAL, event)
        ring.time = SimpleNamespace(monotonic=lambda: 0.0)  # so that a spin until 0.0 is one look
        handle = SimpleNamespace(wake_fds={i: i for i in range(num_readers)}, space_fd=num_readers)
        self.ends = [ring.RingWriter(handle), *(ring.RingReader(handle, i) for i in range(num_readers))]

    def published(self) -> int:
        """The head, as the writer counts it."""
        return self.ends[0]._head

    def _map(self, handle: Any, is_writer: bool) -> Mapping:
        return Mapping(self.port, self.layout, self.capacity, is_writer)
