"""One rank's stores of KV beyond the device: what is saved comes back, whenever copies and files get done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcore.config.options import CacheConfig
from ringcore.config.rank_layout import RankLayout
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.protocol.codec import int_array
from ringcore.protocol.stored_kv import KVLoad, KVTransfers
from ringcore.worker.kv_store import block_files
from ringcore.worker.kv_store.block_file import HEADER_BYTES
from ringcore.worker.kv_store.block_files import BlockFiles
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.directory_connector import DirectoryConnector
from ringcore.worker.kv_store.directory_limit import DirectoryLimit
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.kv_store.memory_connector import MemoryConnector
from ringcore.worker.kv_store.opening import open_connector
from ringcore.worker.memory import cuda_blocks
from ringcore.worker.memory.block_link import LocalBlockLink
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.memory.cuda_blocks import CudaBlockLink
from ringcore.worker.memory.host_link import LocalLink

NUM_BLOCKS = 12


def layers(num_blocks: int = NUM_BLOCKS) -> list[torch.Tensor]:
    """Three layers of one allocation, with room between them; block b of layer i is full of 100 * i + b."""
    memory = torch.zeros(3, num_blocks * 64 + 16, dtype=torch.float32)
    made = [row[: num_blocks * 64].view(num_blocks, 2, 2, 4, 4) for row in memory]
    for index, layer in enumerate(made):
        layer += 100.0 * index + torch.arange(num_blocks).view(-1, 1, 1, 1, 1)
    return made


class LateLink(LocalBlockLink):
    """As a GPU's: a copy is done, at once, when it is asked for the `delay`th time whether it is."""

    def __init__(self, pages: BlockPages, delay: int) -> None:
        super().__init__(pages)
        self._delay = delay
        self._started: list[list[Any]] = []

    def _start(self, copy: Callable[[], None]) -> list[Any]:
        token = [self._delay, copy]
        if not self._delay:
            copy()
        self._started.append(token)
        return token

    def save(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> Any:
        super().save(block_ids, places)  # the step after it is ordered behind it
        return self._start(lambda: None)

    def load(self, places: Sequence[torch.Tensor], block_ids: Sequence[int]) -> Any:
        return self._start(lambda: LocalBlockLink.load(self, places, block_ids))

    def is_done(self, token: Any) -> bool:
        if token[0] <= 0:
            return True
        token[0] -= 1
        if not token[0]:
            token[1]()
        return not token[0]

    def finish(self) -> None:
        for token in self._started:
            while not self.is_done(token):
                continue


def in_directory(
    root: Path, link: LocalBlockLink, num_places: int = 8, max_bytes: int = 1 << 30, timeout_s: float = 20.0
) -> DirectoryConnector:
    """Of one rank, in its folder under `root`."""
    files = BlockFiles(folder_in(root), link.pages.block_bytes, DirectoryLimit(root, max_bytes, 1), timeout_s)
    return DirectoryConnector(link, HostBlocks(num_places, link, 1), files, timeout_s)


def folder_in(root: Path) -> Path:
    return root / ("0" * 64) / "0-of-1"


def names_in(root: Path) -> list[str]:
    return sorted(file.name for file in folder_in(root).iterdir())


def until_written(store: DirectoryConnector) -> None:
    store._files._writers.submit(lambda: None).result(20)
    store._progress()


def until_known(store: KVConnector, number: int) -> list[bool]:
    deadline = time.monotonic() + 20
    while (found := store.results([number], 0.0)[0]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return found


def transfer(
    store: KVConnector,
    drops: Sequence[bytes] = (),
    saves: dict[bytes, int] | None = None,
    loads: dict[int, dict[bytes, int]] | None = None,
) -> None:
    saves = saves or {}
    loading = [KVLoad(n, list(own), int_array(list(own.values()))) for n, own in (loads or {}).items()]
    store.transfer(KVTransfers(list(drops), list(saves), int_array(list(saves.values())), loading))


@pytest.mark.parametrize("is_one", [True, False])
def test_pages_as_bytes(is_one: bool) -> None:
    """Layers of one allocation are copied as one; others, and views with the blocks within, one by one."""
    pool = layers()
    if not is_one:
        pool[1] = torch.stack([pool[1]] * 2, dim=0).movedim(1, 0).contiguous().movedim(0, 2).movedim(2, 0)
    pages, before = BlockPages(pool), [layer.clone() for layer in pool]
    assert len(pages._views) == (1 if is_one else 3)
    ids = torch.tensor([7, 2, 11])
    kept = torch.empty((3, pages.block_bytes), dtype=torch.uint8)
    pages.gather(ids, kept)
    for layer in pool:
        layer[ids] = -1.0
    pages.scatter(torch.tensor([2, 11, 7]), kept[[1, 2, 0]])
    assert all(torch.equal(layer, was) for layer, was in zip(pool, before, strict=True))


def test_the_layout_is_told() -> None:
    pool = layers()
    assert BlockPages(pool).layout == BlockPages(layers()).layout
    assert BlockPages(pool).layout != BlockPages([layer.half() for layer in pool]).layout
    assert BlockPages(pool).layout != BlockPages([layer.view(NUM_BLOCKS, 2, 4, 2, 4) for layer in pool]).layout


class FakeCuda:
    """Streams that note what they are told, in order; copies are done at once."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current, self.is_done, self._num_events = "compute", False, 0
        self._names = iter(["out", "in"])

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream(next(self._names))

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.log.append((name, "waits for", event.of)),
            wait_stream=lambda other: self.log.append((name, "waits for", other.name)),
            synchronize=lambda: self.log.append((name, "synchronized")),
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream(self.current)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(of="", query=lambda: self.is_done)

        def record(stream: SimpleNamespace) -> None:
            self.log.append((stream.name, "event"))
            self._num_events += 1
            event.of = f"{stream.name} {self._num_events}"

        event.record = record
        return event


def test_the_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step waits for what is saved, and not for what is loaded; a load waits for steps before it, and for a save of
    what it reads or overwrites."""
    pool, cuda = layers(), FakeCuda()
    pages, before = BlockPages(pool), [layer.clone() for layer in pool]
    monkeypatch.setattr(cuda_blocks, "_STAGING_BYTES", 2 * pages.block_bytes)
    link = CudaBlockLink(pages, LocalLink(), cuda)
    memory = torch.zeros((7, pages.block_bytes), dtype=torch.uint8)
    places = [memory[place] for place in (5, 4, 0, 1, 2)]
    link.save([1, 3, 5, 7, 9], places)
    assert cuda.log == [("out", "event")] * 6 + [("compute", "waits for", "out 6")]
    cuda.log.clear()
    kept = [layer.clone() for layer in pool]
    for layer in pool:
        layer[[1, 3, 5, 7, 9]] = -1.0
    of_step = ("in", "waits for", "compute 7")
    assert link.is_done(link.load([memory[6]], [0])) is False  # another place, another block
    assert cuda.log == [("compute", "event"), of_step, ("in", "event")]
    cuda.log.clear()
    link.load([memory[6], memory[6], memory[6]], [2, 9, 0])
    waits = [line for line in cuda.log if line[1] == "waits for"]
    assert waits == [("in", "waits for", "out 5"), ("in", "waits for", "compute 9"), ("in", "waits for", "compute 9")]
    cuda.log.clear()
    link.load(places, [1, 3, 5, 7, 9])
    waits = [line[2] for line in cuda.log if line[1] == "waits for"]
    assert waits == ["out 2", "out 1", "compute 11", "out 4", "out 3", "compute 11", "out 6", "out 5", "compute 11"]
    for layer, was in zip(pool, kept, strict=True):
        assert torch.equal(layer[[1, 3, 5, 7, 9]], was[[1, 3, 5, 7, 9]])
    cuda.is_done = True
    cuda.log.clear()
    assert link.is_done(link.load(places[:1], [1]))
    assert [line[2] for line in cuda.log if line[1] == "waits for"] == ["compute 13"]
    for _ in range(3):
        link.save([1], places[:1])
    assert len(link._saving) == 1  # those that have ended are forgotten
    assert all(torch.equal(layer[1], was[1]) for layer, was in zip(pool, before, strict=True))
    link.finish()
    assert cuda.log[-2:] == [("out", "synchronized"), ("in", "synchronized")]


def test_places_beside_each_other_are_copied_at_once() -> None:
    memory = torch.zeros((8, 96), dtype=torch.uint8)
    link = CudaBlockLink(BlockPages(layers()), LocalLink(), FakeCuda())
    places = [memory[place] for place in (6, 5, 0, 1, 2, 4)]
    (chunk,) = link._chunks([10, 11, 12, 13, 14, 15], places)
    assert chunk.block_ids == [12, 13, 14, 15, 11, 10]
    runs = list(chunk.runs())
    assert [rows for rows, _ in runs] == [slice(0, 3), slice(3, 6)]
    assert [run.shape for _, run in runs] == [(3, 96), (3, 96)]
    runs[1][1].fill_(1)
    assert memory[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("is_directory", [False, True])
def test_what_is_saved_comes_back(tmp_path: Path, delay: int, is_directory: bool) -> None:
    pool = layers()
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), delay)
    store = in_directory(tmp_path, link) if is_directory else MemoryConnector(link, HostBlocks(8, link, 1))
    transfer(store, saves={b"one": 1, b"two": 2, b"three": 3})
    for layer in pool:
        layer[1:4] = -1.0
    # With a directory the files may not be there yet.
    transfer(store, loads={0: {b"three": 3, b"none": 5, b"one": 1}})
    assert until_known(store, 0) == [True, False, True]
    assert all(torch.equal(layer[[1, 3]], was[[1, 3]]) for layer, was in zip(pool, before, strict=True))
    assert store.results([1], 0.0) == [None]
    assert store.result(0) is None  # forgotten
    transfer(store, drops=[b"one", b"never saved"], saves={b"four": 4})
    transfer(store, loads={2: {b"two": 2, b"four": 5}})
    assert until_known(store, 2) == [True, True]
    if is_directory:  # a thread removes the file
        until_written(store)
    transfer(store, loads={3: {b"one": 1}})
    assert until_known(store, 3) == [False]
    assert all(torch.equal(layer[[2, 5]], was[[2, 4]]) for layer, was in zip(pool, before, strict=True))
    store.close()
    store.close()
    assert store.counts().memory_loaded_bytes == 4 * link.pages.block_bytes
    if is_directory:
        again = in_directory(tmp_path, link)
        assert sorted(again.held()) == [b"four", b"three", b"two"]
        again.close()


def test_memory_is_in_front_of_the_directory(tmp_path: Path) -> None:
    """Two blocks fit in memory: what left it is read from its file, and stays there, and the others leave it."""
    pool = layers()
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), 2)
    store = in_directory(tmp_path, link, 2)
    for number in (1, 2, 3):
        transfer(store, saves={bytes([number]): number})
        link.finish()
        store._progress()
        until_written(store)
    size = link.pages.block_bytes
    for number, (block, from_memory, from_files) in enumerate([(1, 0, 1), (1, 1, 1), (3, 2, 1), (2, 2, 2), (1, 2, 3)]):
        for layer in pool:
            layer[7] = -1.0
        transfer(store, loads={number: {bytes([block]): 7}})
        assert until_known(store, number) == [True]
        assert all(torch.equal(layer[7], was[block]) for layer, was in zip(pool, before, strict=True))
        counts = store.counts()
        assert counts.memory_loaded_bytes == from_memory * size, number
        assert counts.directory_loaded_bytes == from_files * size, number
        store._cache.check()
    store.close()


def test_a_block_in_memory_counts_as_used_in_the_directory(tmp_path: Path) -> None:
    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link)
    transfer(store, saves={b"a": 1, b"b": 2})
    until_written(store)
    for name in ("61.kv", "62.kv"):
        os.utime(folder_in(tmp_path) / name, (1, 1))
    transfer(store, loads={0: {b"a": 3}})
    assert until_known(store, 0) == [True]
    store.close()
    later = in_directory(tmp_path, link)
    assert later.held() == [b"b", b"a"]
    later.close()


def test_two_loads_of_one_block(tmp_path: Path) -> None:
    link = LateLink(BlockPages(layers()), 2)
    store = in_directory(tmp_path, link)
    transfer(store, saves={b"a": 1})
    store.close()
    store = in_directory(tmp_path, link)
    transfer(store, loads={0: {b"a": 2}, 1: {b"a": 3}})
    assert until_known(store, 0) == until_known(store, 1) == [True]
    assert torch.equal(link.pages._views[0][2], link.pages._views[0][3])
    store.close()


def test_a_step_never_waits_for_a_disk(tmp_path: Path) -> None:
    """What finds no place in memory is not kept: a miss later."""
    link = LateLink(BlockPages(layers()), 1000)
    store = in_directory(tmp_path, link, 4)
    transfer(store, saves={bytes([i]): i for i in range(1, 9)})
    assert [len(blocks) for _, blocks in store._copying_out] == [3]  # one place is for loads
    transfer(store, drops=[bytes([2])])
    link.finish()
    transfer(store, loads={0: {bytes([i]): i for i in range(1, 9)}})
    assert until_known(store, 0) == [True, False, True, *[False] * 5]
    assert store.counts().num_unwritten_blocks == 5
    store.close()
    assert names_in(tmp_path) == ["01.kv", "03.kv"]


def test_files_that_are_no_blocks(tmp_path: Path) -> None:
    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link, 4)
    transfer(store, saves={b"a": 1, b"b": 2})
    store.close()
    folder = folder_in(tmp_path)
    (folder / "no block.kv").write_bytes(b"x")
    (folder / "zz.kv").write_bytes((folder / "61.kv").read_bytes())
    (folder / "63.kv").symlink_to(folder / "61.kv")
    (folder / "64.kv").mkdir()
    os.mkfifo(folder / "65.kv")
    os.utime(folder / "62.kv", (1, 1))
    store = in_directory(tmp_path, link, 4)
    assert store.held() == [b"b", b"a"]  # the least recently used first
    transfer(store, loads={0: {b"c": 3, b"d": 4, b"e": 5, b"f": 6}})
    assert until_known(store, 0) == [False] * 4
    assert store.counts().num_broken_files == 3  # the last one is missing
    store.close()


def damaged(contents: bytes) -> dict[str, bytes]:
    """Every way in which a block's file may be another one."""
    header, block = contents[:HEADER_BYTES], contents[HEADER_BYTES:]
    changed = {f"bit of byte {at}": bytearray(contents) for at in (0, 7, 8, 15, 16, 47, 48, len(contents) - 1)}
    for at, found in zip((0, 7, 8, 15, 16, 47, 48, len(contents) - 1), changed.values(), strict=True):
        found[at] ^= 1
    return {name: bytes(found) for name, found in changed.items()} | {
        "empty": b"",
        "header alone": header,
        "short": contents[:-1],
        "long": contents + b"x",
        "zeros after a crash": header + bytes(len(block)),
        "all zeros": bytes(len(contents)),
    }


def test_no_damaged_file_is_a_block(tmp_path: Path) -> None:
    """Nor is a whole one under another's name, which only its digest tells."""
    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link)
    transfer(store, saves={b"a": 1, b"b": 2})
    store.close()
    good, folder = (folder_in(tmp_path) / "61.kv").read_bytes(), folder_in(tmp_path)
    cases = damaged(good) | {"another's": (folder / "62.kv").read_bytes()}
    for name, contents in cases.items():
        (folder / "61.kv").write_bytes(contents)
        store = in_directory(tmp_path, link)
        transfer(store, loads={0: {b"a": 3, b"b": 4}})
        assert (name, until_known(store, 0)) == (name, [False, True])
        assert store.counts().num_broken_files == 1
        transfer(store, drops=[b"a"])  # as the engine does with what failed
        transfer(store, saves={b"a": 1})
        store.close()
        assert (folder / "61.kv").read_bytes() == good
    assert link.pages.block_bytes == len(good) - HEADER_BYTES


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory keeps what no file does."""

    def write(file: int, part: Any) -> int:
        raise OSError(28, "No space left on device")

    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link, 4)
    with monkeypatch.context() as patched:
        patched.setattr("ringcore.worker.kv_store.block_file.os.write", write)
        for name in (b"a", b"b"):
            transfer(store, saves={name: 1})
            until_written(store)
    assert [record.message for record in caplog.records if "No space left" in record.message].__len__() == 1
    assert store.counts().num_unwritten_blocks == 2
    assert not names_in(tmp_path)
    transfer(store, loads={0: {b"a": 1, b"b": 2}})
    assert until_known(store, 0) == [True, True]
    store.close()


# A file system that hangs.


class HungDisk:
    """While it hangs a read or write waits, in the thread that began it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._goes_on, self.num_waiting = threading.Event(), 0
        self._goes_on.set()
        for name in ("read_block", "write_block"):
            monkeypatch.setattr(block_files, name, self._slow(vars(block_files)[name]))

    def _slow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.num_waiting += 1
            self._goes_on.wait(60)
            self.num_waiting -= 1
            return function(*args)

        return call

    def hang(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    made = HungDisk(monkeypatch)
    yield made
    made.go_on()


def filled(root: Path, link: LocalBlockLink, num_blocks: int) -> None:
    """A directory with blocks 1 to num_blocks, as a former engine leaves it."""
    store = in_directory(root, link, 2 * num_blocks)
    transfer(store, saves={bytes([i]): i for i in range(1, num_blocks + 1)})
    store.close()


def test_a_hung_read_is_a_miss(tmp_path: Path, disk: HungDisk, caplog: pytest.LogCaptureFixture) -> None:
    """The load ends at the deadline; the directory is out of use, with one warning; memory remains; it ends at once."""
    pool = layers()
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), 1)
    filled(tmp_path, link, 8)
    store = in_directory(tmp_path, link, 8, timeout_s=0.2)
    transfer(store, saves={b"in memory": 9})
    link.finish()
    store._progress()
    until_written(store)
    disk.hang()
    transfer(store, loads={0: {b"in memory": 9, **{bytes([i]): i for i in range(1, 9)}}})
    assert until_known(store, 0) == [True] + [False] * 8
    assert store.counts().num_lost_directories == 1
    store._cache.check()
    transfer(store, saves={b"later": 10}, loads={1: {b"\x01": 1, b"in memory": 9}})
    transfer(store, loads={2: {b"later": 11}})
    assert until_known(store, 1) == [False, True]
    assert until_known(store, 2) == [True]
    assert all(torch.equal(layer[11], was[10]) for layer, was in zip(pool, before, strict=True))
    assert sum("has not answered for 0.2 s" in record.message for record in caplog.records) == 1
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 2
    assert disk.num_waiting == 4  # every reader still hangs


def test_what_a_hung_thread_does_later_harms_no_block(tmp_path: Path, disk: HungDisk) -> None:
    """Its place in memory is nobody else's until it has ended; then it can be used again."""
    pool = layers()
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), 0)
    filled(tmp_path, link, 3)
    store = in_directory(tmp_path, link, 8, timeout_s=0.1)
    disk.hang()
    transfer(store, saves={b"hung": 4, b"behind": 8}, loads={0: {b"\x01": 1, b"\x02": 2}})
    assert until_known(store, 0) == [False, False]
    assert store._cache.num_available == 5
    transfer(store, saves={bytes([number]): number for number in range(5, 12)})
    assert store._cache.num_available == 5  # all of these have been filled, or were not kept
    disk.go_on()
    deadline = time.monotonic() + 20
    while store._reading or store._writing:
        assert time.monotonic() < deadline
        store._progress()
    assert store._cache.num_available == 8
    transfer(store, loads={1: {b"\x05": 8, b"hung": 9, b"\x01": 10}})
    assert until_known(store, 1) == [True, True, False]
    for there, was in ((8, 5), (9, 4)):
        assert all(torch.equal(layer[there], old[was]) for layer, old in zip(pool, before, strict=True))
    store.close()
    store = in_directory(tmp_path, link)
    transfer(store, loads={0: {b"hung": 10}})  # written late, and with its own bytes
    assert until_known(store, 0) == [True]
    assert all(torch.equal(layer[10], old[4]) for layer, old in zip(pool, before, strict=True))
    store.close()


@pytest.mark.parametrize("num_places", [8, 32])  # four wait for a place, or for a thread
def test_a_slow_disk_is_not_waited_for(tmp_path: Path, disk: HungDisk, num_places: int) -> None:
    """Each read is in time and all of them together are not: the directory stays in use, and the rest is a miss."""
    link = LateLink(BlockPages(layers()), 0)
    filled(tmp_path, link, 8)
    store = in_directory(tmp_path, link, num_places, timeout_s=20.0)
    store._timeout_s = 0.2  # of the load alone
    disk.hang()
    transfer(store, loads={0: {bytes([i]): i for i in range(1, 9)}})
    while disk.num_waiting < 4:
        time.sleep(0.001)
    time.sleep(0.3)
    store._progress()
    disk.go_on()
    assert until_known(store, 0) == [True] * 4 + [False] * 4  # four threads had begun
    assert not store.counts().num_lost_directories
    store._timeout_s = 20.0
    transfer(store, loads={1: {bytes([i]): i for i in range(1, 9)}})
    assert until_known(store, 1) == [True] * 8
    store.close()


def test_the_end_waits_for_writes_only_so_long(tmp_path: Path, disk: HungDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "_CLOSE_S", 0.2)
    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link)
    disk.hang()
    transfer(store, saves={b"a": 1, b"b": 2})
    began = time.monotonic()
    store.close()
    store.close()
    assert 0.1 < time.monotonic() - began < 10


def test_a_hung_thread_keeps_no_process_alive() -> None:
    """Nor does one whose work has not begun."""
    code = """
import threading
from ringcore.worker.kv_store.disk_threads import DiskThreads

threads, begun = DiskThreads("kv reader", 1), threading.Event()
threads.submit(lambda: (begun.set(), threading.Event().wait()))
waiting = threads.submit(lambda: None)
begun.wait()
threads.close()
assert waiting.cancelled()
assert threads.submit(lambda: None).cancelled()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The size of the directory.


def write(path: Path, num_bytes: int, used_s: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (used_s, used_s))


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    """Of every model and rank; what is no block stays."""
    one, two = tmp_path / ("1" * 64), tmp_path / ("2" * 64)
    files = [one / "r0" / "01.kv", two / "r0" / "02.kv", one / "r1" / "03.kv", two / "r1" / "04.kv"]
    for age, path in enumerate(files):
        write(path, 100, age + 1)
    others = [tmp_path / "mine.kv", tmp_path / "notes" / "r0" / "05.kv", one / "r0" / "notes.kv", one / "06.kv"]
    others += [one / "r0" / "07.txt"]
    for path in others:
        write(path, 1000, 0)
    write(one / "r0" / "dead.tmp", 10, 5)
    (one / "r0" / "alive.tmp").write_bytes(b"x")
    DirectoryLimit(tmp_path, 400, 1).sweep()
    assert all(path.exists() for path in files + others)
    assert not (one / "r0" / "dead.tmp").exists()
    assert (one / "r0" / "alive.tmp").exists()
    DirectoryLimit(tmp_path, 399, 1).sweep()  # to seven eighths
    assert [path.exists() for path in files] == [False, True, True, True]
    DirectoryLimit(tmp_path, 200, 1).sweep()
    assert [path.exists() for path in files] == [False, False, False, True]
    DirectoryLimit(tmp_path, 1, 1).sweep()
    assert not any(path.exists() for path in files)
    assert all(path.exists() for path in others)
    DirectoryLimit(tmp_path / "none", 1, 1).sweep()


def test_engines_that_share_a_directory_keep_to_its_size(tmp_path: Path) -> None:
    """Three write and read at the same time: it stays within its limit, every block is right or missing, and the one
    that all use stays."""
    pool = layers(200)
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), 0)
    file_bytes = HEADER_BYTES + link.pages.block_bytes
    limit = 40 * file_bytes
    stores = [in_directory(tmp_path, link, 4, limit) for _ in range(3)]
    transfer(stores[0], saves={b"shared": 150})
    until_written(stores[0])
    most, num_missing = 0, 0
    for number in range(40):
        for own, store in enumerate(stores):
            block = 3 * number + own + 1
            transfer(store, saves={bytes([own, number]): block})
            until_written(store)
            store._files._sweep.result(20)
            other = max(0, number - 12)
            transfer(store, loads={number: {b"shared": 160, bytes([(own + 1) % 3, other]): 170}})
            is_loaded = until_known(store, number)
            num_missing += not is_loaded[1]
            expected = [150, 3 * other + (own + 1) % 3 + 1]
            for there, was, is_there in zip((160, 170), expected, is_loaded, strict=True):
                assert not is_there or all(
                    torch.equal(new[there], old[was]) for new, old in zip(pool, before, strict=True)
                )
            assert is_loaded[0]
        most = max(most, sum(file.stat().st_size for file in folder_in(tmp_path).iterdir()))
    assert 0.7 * limit < most <= limit + 3 * (limit // 16)
    assert num_missing
    for store in stores:
        store.close()


# Opening.


def opened(root: Path, pages: BlockPages, backend: object = "", rank: int = 0, **options: Any) -> KVConnector:
    cache = CacheConfig(host_kv_cache_bytes=1 << 20, host_kv_cache_dir=str(root), **options)
    config: Any = SimpleNamespace(cache=cache, parallel=SimpleNamespace(layout=RankLayout.on_one_host(2)))
    paged: Any = SimpleNamespace(block_pages=lambda: pages, backends=[backend])
    platform: Any = SimpleNamespace(block_link=LocalBlockLink)
    return open_connector(config, rank, paged, platform, "0" * 64, 4)


def test_a_folder_for_each_rank_and_layout(tmp_path: Path) -> None:
    """Also where two backends have pages of one shape, whose bytes mean something else."""
    pages, half = BlockPages(layers()), BlockPages([layer.half() for layer in layers()])
    for made in (
        opened(tmp_path, pages),
        opened(tmp_path, pages),
        opened(tmp_path, pages, rank=1),
        opened(tmp_path, pages, backend=0),
        opened(tmp_path, half),
    ):
        made.close()
    assert len(list((tmp_path / ("0" * 64)).iterdir())) == 4
    assert len(list((tmp_path / ("0" * 64)).glob("*-1-of-2"))) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = BlockPages(layers())
    (tmp_path / ("0" * 64)).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"host_kv_cache_dir=.* cannot be used: Not a directory; give another one"):
        opened(tmp_path, pages)
    goes_on = threading.Event()
    monkeypatch.setattr(BlockFiles, "_open", lambda self: goes_on.wait(60))
    with pytest.raises(ConfigError, match=r"cannot be used: no answer for 0.1 s; give another one"):
        opened(tmp_path, pages, host_kv_cache_dir_timeout_s=0.1)
    goes_on.set()


def test_a_directory_that_cannot_be_swept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = LateLink(BlockPages(layers()), 0)
    store = in_directory(tmp_path, link)
    store._files._limit._root = Path(os.devnull)
    store._files._make_room()
    assert "cannot be kept within host_kv_cache_dir_bytes" in caplog.text
    store.close()


def test_a_spec_has_its_bytes() -> None:
    """A block of the planner's is one of the worker's."""
    spec = FullAttentionSpec(4, 2, 4, "float32")
    assert BlockPages(layers()).block_bytes == 3 * spec.page_size_bytes
