"""One rank's stores of KV beyond the device: what is saved comes back, whenever copies and files get done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.protocol.codec import int_array
from ringcore.protocol.stored_kv import KVLoad, KVTransfers
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.directory_connector import DirectoryConnector
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.kv_store.memory_connector import MemoryConnector
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
        self.current = "compute"
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
        event = SimpleNamespace(of="", query=lambda: True)

        def record(stream: SimpleNamespace) -> None:
            self.log.append((stream.name, "event"))
            event.of = stream.name

        event.record = record
        return event


def test_the_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step waits for what is saved, and not for what is loaded; a load waits for saves and for steps before it."""
    pool, cuda = layers(), FakeCuda()
    pages, before = BlockPages(pool), [layer.clone() for layer in pool]
    monkeypatch.setattr(cuda_blocks, "_STAGING_BYTES", 2 * pages.block_bytes)
    link = CudaBlockLink(pages, LocalLink(), cuda)
    places = [torch.zeros(pages.block_bytes, dtype=torch.uint8) for _ in range(5)]
    link.save([1, 3, 5, 7, 9], places)
    assert cuda.log == [("out", "event"), ("compute", "waits for", "out")]
    cuda.log.clear()
    for layer in pool:
        layer[[1, 3, 5, 7, 9]] = -1.0
    assert link.is_done(link.load(places, [1, 3, 5, 7, 9]))
    assert all(torch.equal(layer, was) for layer, was in zip(pool, before, strict=True))
    assert cuda.log[:2] == [("compute", "event"), ("in", "waits for", "out")]
    assert cuda.log[2:] == [("in", "waits for", "compute")] * 3 + [("in", "event")]
    link.finish()
    assert cuda.log[-2:] == [("out", "synchronized"), ("in", "synchronized")]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("is_directory", [False, True])
def test_what_is_saved_comes_back(tmp_path: Path, delay: int, is_directory: bool) -> None:
    pool = layers()
    before = [layer.clone() for layer in pool]
    link = LateLink(BlockPages(pool), delay)
    places = HostBlocks(8, link, 1)
    store = DirectoryConnector(tmp_path / "a", link, places) if is_directory else MemoryConnector(link, places)
    transfer(store, saves={b"one": 1, b"two": 2, b"three": 3})
    for layer in pool:
        layer[1:4] = -1.0
    # The files may not be there yet.
    transfer(store, loads={0: {b"three": 3, b"none": 5, b"one": 1}})
    assert until_known(store, 0) == [True, False, True]
    assert all(torch.equal(layer[[1, 3]], was[[1, 3]]) for layer, was in zip(pool, before, strict=True))
    assert store.results([1], 0.0) == [None]
    assert store.result(0) is None  # forgotten
    transfer(store, drops=[b"one", b"never saved"], saves={b"four": 4})
    transfer(store, loads={2: {b"two": 2, b"four": 5}, 3: {b"one": 1}})
    assert until_known(store, 2) == [True, True]
    assert until_known(store, 3) == [False]
    assert all(torch.equal(layer[[2, 5]], was[[2, 4]]) for layer, was in zip(pool, before, strict=True))
    store.close()
    store.close()
    if is_directory:
        again = DirectoryConnector(tmp_path / "a", link, HostBlocks(8, link, 1))
        assert sorted(again.held()) == [b"four", b"three", b"two"]
        again.close()


def test_a_step_never_waits_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no buffer is not kept: a miss later."""
    link = LateLink(BlockPages(layers()), 1000)
    store = DirectoryConnector(tmp_path, link, HostBlocks(4, link, 1))
    transfer(store, saves={bytes([i]): i for i in range(1, 9)})
    assert len(store._copying_out) == 3  # one buffer is for loads
    transfer(store, drops=[bytes([2])])
    link.finish()
    transfer(store, loads={0: {bytes([i]): i for i in range(1, 9)}})
    assert until_known(store, 0) == [True, False, True, *[False] * 5]
    store.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["01.kv", "03.kv"]


def test_files_that_are_no_blocks(tmp_path: Path) -> None:
    link = LateLink(BlockPages(layers()), 0)
    store = DirectoryConnector(tmp_path, link, HostBlocks(4, link, 1))
    transfer(store, saves={b"a": 1, b"b": 2})
    store.close()
    (tmp_path / "no block.kv").write_bytes(b"x")
    (tmp_path / "zz.kv").write_bytes((tmp_path / "61.kv").read_bytes())
    (tmp_path / "1-1.tmp").write_bytes(b"of a writer that died")
    (tmp_path / "63.kv").symlink_to(tmp_path / "61.kv")
    os.utime(tmp_path / "62.kv", (1, 1))
    store = DirectoryConnector(tmp_path, link, HostBlocks(4, link, 1))
    assert store.held() == [b"b", b"a"]  # the least recently used first
    assert not (tmp_path / "1-1.tmp").exists()
    transfer(store, loads={0: {b"c": 3}})
    assert until_known(store, 0) == [False]
    store.close()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def write(file: int, part: Any) -> int:
        raise OSError(28, "No space left on device")

    link = LateLink(BlockPages(layers()), 0)
    store = DirectoryConnector(tmp_path, link, HostBlocks(4, link, 1))
    with monkeypatch.context() as patched:
        patched.setattr("ringcore.worker.kv_store.block_file.os.write", write)
        transfer(store, saves={b"a": 1})
        store._writer.submit(lambda: None).result()
    transfer(store, loads={0: {b"a": 1}})
    assert until_known(store, 0) == [False]
    assert "No space left" in caplog.text
    assert store._buffers.num_free == 4
    assert not list(tmp_path.iterdir())
    store.close()


def test_a_spec_has_its_bytes() -> None:
    """A block of the planner's is one of the worker's."""
    spec = FullAttentionSpec(4, 2, 4, "float32")
    assert BlockPages(layers()).block_bytes == 3 * spec.page_size_bytes
