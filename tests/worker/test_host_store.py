"""Stores that are made ahead, that find no room, that are closed too early; and a GPU's way to the host's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_drivers import FakeRuntime
from fake_virtual_memory import FakeVirtualMemory
from rank_memory import LateLink

from ringcore.errors import CapacityError, ConfigError
from ringcore.worker.memory import file_store as file_module
from ringcore.worker.memory import host_store as store_module
from ringcore.worker.memory.cuda_memory import CudaLink
from ringcore.worker.memory.file_store import FileStore
from ringcore.worker.memory.host_link import LocalLink
from ringcore.worker.memory.host_store import HostBudget, HostStore, MemoryStore

MIB = 1 << 20
PLENTY = HostBudget(lambda: 1 << 40, 1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(store_module, "_COPY_BYTES", 2 * MIB)
    monkeypatch.setattr(file_module, "_PIECE_BYTES", MIB)


def cuda_link() -> tuple[FakeRuntime, CudaLink]:
    runtime = FakeRuntime()
    return runtime, CudaLink(torch.device("cuda", 1), runtime, runtime)


def contents(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestCuda:
    @pytest.mark.parametrize("num_bytes", [1, MIB, 7 * MIB + 123])
    @pytest.mark.parametrize("is_file", [False, True])
    def test_what_is_saved_comes_back(self, tmp_path: Path, num_bytes: int, is_file: bool) -> None:
        """Through registered memory alone, one registration at a time, on the device's own stream."""
        runtime, link = cuda_link()
        store = FileStore(num_bytes, str(tmp_path), link) if is_file else MemoryStore(num_bytes, link, PLENTY)
        store.allocate_in_background()
        for seed in range(3):
            held = contents(num_bytes, seed)
            store.ready()
            store.save(held)
            store.finish()
            assert runtime.is_idle
            out = torch.empty_like(held)
            store.restore(out, 0)
            store.finish()
            assert torch.equal(out, held)
            store.drop()
        assert len(runtime.registered) == 1, "made once"
        assert runtime.devices == {torch.device("cuda", 1)}
        assert runtime.registering_threads.isdisjoint({threading.get_ident()})
        store.close()
        store.close()
        assert not runtime.registered

    def test_a_copy_stays_within_one_registration(self) -> None:
        runtime, link = cuda_link()
        store = MemoryStore(5 * MIB, link, PLENTY)
        store.ready()
        store.save(contents(5 * MIB))
        store.finish()
        assert [size for _, size in runtime.copies] == [2 * MIB, 2 * MIB, MIB]
        ((begin, size),) = runtime.registered.items()
        assert all(begin <= at and at + n <= begin + size for at, n in runtime.copies)
        store.close()

    def test_the_threads_mode_is_as_before(self) -> None:
        runtime, link = cuda_link()
        for runtime.code in (0, 801):
            memory = torch.empty(10, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                link.register(memory)
            assert runtime.cuThreadExchangeStreamCaptureMode("global") == (0, "global")

    def test_registration_that_fails(self) -> None:
        runtime, link = cuda_link()
        store = MemoryStore(MIB, link, PLENTY)
        runtime.code = 2
        with pytest.raises(CapacityError, match=r"cudaHostRegister on cuda:1: .* cannot be pinned; give sleep_"):
            store.ready()
        runtime.code = 801
        with pytest.raises(RuntimeError, match="cudaHostRegister on cuda:1: error 801"):
            store.ready()
        runtime.code = 0
        store.ready()
        store.close()
        assert not runtime.registered

    def test_a_registration_that_fails_keeps_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though its error is kept for whoever sleeps."""
        pages = []

        class Pages(store_module.HugePages):
            def __init__(self, num_bytes: int) -> None:
                super().__init__(num_bytes)
                pages.append(weakref.ref(self.tensor))

        monkeypatch.setattr(store_module, "HugePages", Pages)
        runtime, link = cuda_link()
        store = MemoryStore(4 * MIB, link, PLENTY)
        runtime.code = 801
        store.allocate_in_background()
        assert store._making is not None
        assert "error 801" in str(store._making.exception(20))
        wait_until(lambda: pages[0]() is None)
        store.close()

    def test_a_file_whose_buffers_cannot_be_registered(self, tmp_path: Path) -> None:
        runtime, link = cuda_link()
        store = FileStore(MIB, str(tmp_path), link)
        runtime.code = 2
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CapacityError):
            store.ready()
        assert len(os.listdir("/proc/self/fd")) == before
        store.close()


@pytest.mark.parametrize("is_file", [False, True])
def test_parts_that_are_restored_one_by_one(tmp_path: Path, is_file: bool) -> None:
    """Copies of one are under way while the next is read; what one cycle has left disturbs no other."""
    num_bytes, page = 9 * MIB + 123, 4096
    device = FakeVirtualMemory()
    link = LateLink(device)
    store = FileStore(num_bytes, str(tmp_path), link) if is_file else MemoryStore(num_bytes, link, PLENTY)
    store.ready()
    for seed, ends in enumerate(([page, MIB, 4 * MIB + page, num_bytes], [num_bytes], [3 * MIB, 9 * MIB, num_bytes])):
        held = contents(num_bytes, seed)
        store.save(held)
        store.finish()
        out = torch.zeros_like(held)
        store.restore(out[:page], 0)  # a wake-up that ended early
        device.synchronize()
        begin = 0
        for end in ends:
            store.restore(out[begin:end], begin)
            begin = end
        assert not torch.equal(out, held), "it is only begun"
        store.finish()
        assert torch.equal(out, held)
    with pytest.raises(AssertionError):
        store.restore(out, 1)
    store.close()


class TestMadeAhead:
    def test_a_failure_is_logged_and_met_again_and_may_pass(self, caplog: pytest.LogCaptureFixture) -> None:
        free = [3 * MIB]
        _, link = cuda_link()
        store = MemoryStore(8 * MIB, link, HostBudget(lambda: free[0], 2))
        with caplog.at_level("WARNING"):
            store.allocate_in_background()
            wait_until(lambda: bool(caplog.records))
        assert "sleep_directory" in caplog.records[0].getMessage()
        with pytest.raises(CapacityError, match=r"give sleep_directory, .* or sleep with level=2") as error:
            store.ready()
        assert error.value.details["available_bytes"] == 3 * MIB
        assert error.value.details["needed_bytes"] > 8 * MIB, "what the other rank may be taking counts"
        free[0] = 1 << 40
        store.ready()
        store.close()

    def test_memory_that_runs_out_meanwhile(self) -> None:
        """Others take it at the same time."""
        left = iter([1 << 40] * 3 + [0] * 100)
        _, link = cuda_link()
        with pytest.raises(CapacityError):
            MemoryStore(8 * MIB, link, HostBudget(lambda: next(left), 1)).ready()

    def test_the_first_use_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()
        runtime, link = cuda_link()
        runtime.gate = gate
        store = MemoryStore(MIB, link, PLENTY)
        store.allocate_in_background()
        monkeypatch.setattr(store_module, "_TIMEOUT_S", 0.05)
        with pytest.raises(RuntimeError, match="not allocated after"):
            store.ready()
        monkeypatch.setattr(store_module, "_TIMEOUT_S", 20.0)
        threading.Timer(0.05, gate.set).start()
        store.ready()
        store.save(contents(MIB))
        store.close()

    def test_close_stops_it(self, caplog: pytest.LogCaptureFixture) -> None:
        asked = threading.Event()
        num_asked = []

        def free_bytes() -> int:
            num_asked.append(1)
            asked.set()
            time.sleep(0.01)
            return 1 << 40

        runtime, link = cuda_link()
        store = MemoryStore(1000 * MIB, link, HostBudget(free_bytes, 1))
        store.allocate_in_background()
        assert asked.wait(20)
        store.close()
        assert len(num_asked) < 500
        assert not runtime.registered
        assert not [thread for thread in threading.enumerate() if thread.name in ("host store", "host memory")]
        assert not caplog.records

    def test_its_threads_keep_no_process_alive(self) -> None:
        gate = threading.Event()
        runtime, link = cuda_link()
        runtime.gate = gate
        store = MemoryStore(MIB, link, PLENTY)
        store.allocate_in_background()
        wait_until(lambda: bool(runtime.waiting))
        assert all(t.daemon for t in threading.enumerate() if t.name in ("host store", "host memory"))
        gate.set()
        store.close()


class TestOnACpu:
    def test_pages_are_taken_by_a_save_and_given_back(self) -> None:
        store = MemoryStore(64 * MIB, LocalLink(), PLENTY)
        held, before = contents(64 * MIB), resident()
        store.ready()
        assert resident() - before < 8 * MIB
        store.save(held)
        assert resident() - before > 60 * MIB
        store.drop()
        assert resident() - before < 8 * MIB
        store.close()

    def test_no_room_keeps_nothing(self) -> None:
        left = iter([1 << 40] * 3 + [MIB] * 100)
        store = MemoryStore(16 * MIB, LocalLink(), HostBudget(lambda: next(left), 1))
        store.ready()
        held, before = contents(16 * MIB), resident()
        with pytest.raises(CapacityError) as error:
            store.save(held)
        assert error.value.details == {"needed_bytes": 14 * MIB, "available_bytes": MIB}
        assert resident() - before < 3 * MIB
        store.close()


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class TestFile:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[FileStore]:
        store = FileStore(5 * MIB + 77, str(tmp_path), LocalLink())
        store.ready()
        yield store
        store.close()

    def test_it_has_no_name_and_goes_with_its_store(self, store: FileStore, tmp_path: Path) -> None:
        store.save(contents(store.num_bytes))
        assert not list(tmp_path.iterdir())
        assert open_files(tmp_path) == 1
        store.close()
        store.close()
        assert open_files(tmp_path) == 0

    @pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk(self, store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
        held = contents(store.num_bytes)

        def refuse(*args: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(file_module.os, call, refuse)
            with pytest.raises(CapacityError, match=r"sleep_directory=.* make room, give another directory") as error:
                store.save(held)
        assert error.value.details["needed_bytes"] == store.num_bytes
        assert error.value.details["available_bytes"] > 0
        check_works(store)

    def test_the_kernels_own_limit(self, store: FileStore, tmp_path: Path) -> None:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, old[1]))
        try:
            with pytest.raises(CapacityError, match="File too large"):
                store.save(contents(store.num_bytes))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        check_works(store)

    def test_short_writes_and_reads_go_on(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
        pwrite, preadv = os.pwrite, os.preadv
        monkeypatch.setattr(file_module.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:300_000], at))
        monkeypatch.setattr(file_module.os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:200_000]], at))
        check_works(store)

    def test_a_disk_that_does_not_give_it_back(self, store: FileStore) -> None:
        store.save(contents(store.num_bytes))
        os.ftruncate(store._fd(), MIB)
        with pytest.raises(OSError, match="ends at 1048576 of 5242957 bytes"):
            store.restore(torch.empty(store.num_bytes, dtype=torch.uint8), 0)

    def test_no_such_directory(self, tmp_path: Path) -> None:
        store = FileStore(MIB, str(tmp_path / "gone"), LocalLink())
        with pytest.raises(ConfigError, match="no file can be made there: No such file") as error:
            store.ready()
        assert error.value.details["option"] == "sleep_directory"
        store.close()


def check_works(store: HostStore) -> None:
    held = contents(store.num_bytes, 4)
    store.save(held)
    out = torch.empty_like(held)
    store.restore(out, 0)
    store.finish()
    assert torch.equal(out, held)


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(link) and os.readlink(link).startswith(str(folder)) for link in links)
