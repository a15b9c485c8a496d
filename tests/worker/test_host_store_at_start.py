"""Room for weights on the host is made while the rank comes up, and goes again where it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_drivers import FakeRuntime
from step_driver import make_config, plan

from ringcore.errors import ModelLoadError
from ringcore.model_executor import loader
from ringcore.model_executor.models.decoder import DenseDecoder
from ringcore.worker import worker as worker_module
from ringcore.worker.memory import host_store as store_module
from ringcore.worker.memory.cuda_memory import CudaLink
from ringcore.worker.memory.host_store import HostStore
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.runner.loaded_model import BuiltModel
from ringcore.worker.worker import Worker

AWAY = {"weights": "offloaded", "kv_cache": "discarded"}
NAMES = ("host store", "host memory")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Of a device that wants memory registered."""
    runtime = FakeRuntime()
    link = CudaLink(torch.device("cuda", 0), runtime, runtime)
    monkeypatch.setattr(CpuPlatform, "host_link", lambda self: link)
    return runtime


@pytest.fixture
def worker(tiny_llama: tuple[str, Any], runtime: FakeRuntime) -> Iterator[Worker]:
    worker = Worker(make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True), 0, None)
    worker.init_device()
    yield worker
    worker.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name in NAMES]
    assert not runtime.registered


class _Kernels:
    """In place of those that are compiled while weights are read."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told

    def follow(self, built: BuiltModel) -> None:
        pass

    def finish(self) -> float:
        self._told()
        return 0.0


def test_it_begins_before_weights_and_kernels_are_there(
    worker: Worker, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it will have to hold; and the first sleep waits for no other one."""
    events: list[tuple[str, int]] = []
    readers, bind = loader.Readers.read, DenseDecoder.bind
    making: list[threading.Event] = []

    def note(what: str) -> None:
        assert worker._platform is not None
        events.append((what, worker._platform.arenas["weights"].used_bytes))

    def allocate_in_background(store: HostStore) -> None:
        note("store")
        making.append(threading.Event())
        original(store)

    def read(self: Any, *arguments: Any) -> Any:
        note("read")
        return readers(self, *arguments)

    def bound(self: Any, *arguments: Any, **named: Any) -> None:
        note("bind")
        bind(self, *arguments, **named)

    original = HostStore.allocate_in_background
    monkeypatch.setattr(HostStore, "allocate_in_background", allocate_in_background)
    monkeypatch.setattr(loader.Readers, "read", read)
    monkeypatch.setattr(DenseDecoder, "bind", bound)
    monkeypatch.setattr(worker_module, "_compile_kernels", lambda *arguments: _Kernels(lambda: note("kernels")))
    runtime.gate = threading.Event()  # it takes until after the start
    worker.load_model()
    worker.initialize_from_config(plan(worker, 10))
    assert events[0][0] == "store"
    assert {what for what, _ in events[1:]} == {"read", "bind", "kernels"}
    assert len({used for _, used in events}) == 1, "the size is known"
    assert len(making) == 1
    runtime.gate.set()
    report = worker.prepare_memory(AWAY)
    assert report["copied_bytes"] == events[0][1]
    worker.commit_memory()
    ((_, registered),) = runtime.registered.items()
    assert registered == events[0][1]
    worker.prepare_memory({"weights": "resident", "kv_cache": "resident"})
    worker.commit_memory()


@pytest.mark.parametrize("is_making", [False, True], ids=["made", "making"])
def test_a_start_that_fails_leaves_nothing(
    worker: Worker, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, is_making: bool
) -> None:
    """The fixture looks for threads and memory after the shutdown."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise ModelLoadError("told to fail", path="here")

    runtime.gate = threading.Event()
    monkeypatch.setattr(DenseDecoder, "bind", fail)
    with pytest.raises(ModelLoadError, match="told to fail"):
        worker.load_model()
    assert [thread.name for thread in threading.enumerate() if thread.name == "host store"] == ["host store"]
    release = threading.Timer(0.1 if is_making else 0.0, runtime.gate.set)
    release.start()
    if not is_making:
        release.join()
    worker.shutdown()
    release.join()


def test_an_engine_that_does_not_sleep_makes_none(
    tiny_llama: tuple[str, Any], runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(worker_module, "begin_host_store", refuse)
    worker = Worker(make_config(tiny_llama[0], device="cpu"), 0, None)
    worker.init_device()
    worker.load_model()
    worker.shutdown()
    assert not runtime.registered


def test_a_directory_is_used_as_early(tiny_llama: tuple[str, Any], runtime: FakeRuntime, tmp_path: Path) -> None:
    config = make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True, sleep_directory=tmp_path)
    worker = Worker(config, 0, None)
    worker.init_device()
    worker.load_model()
    assert worker._host_store is not None
    worker._host_store.ready()
    assert len(runtime.registered) == 1, "its buffers"
    worker.shutdown()
    assert not runtime.registered


@pytest.mark.parametrize(("num_ranks", "ahead", "awaited"), [(1, 4, 16), (2, 2, 8), (8, 1, 2)])
def test_most_cores_are_left_to_what_is_compiled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, num_ranks: int, ahead: int, awaited: int
) -> None:
    num_threads: list[int] = []

    class Pages(store_module.HugePages):
        def populate(self, num: int, piece_bytes: int, may_take: Callable[[int], bool]) -> bool:
            num_threads.append(num)
            return super().populate(1, piece_bytes, may_take)

    monkeypatch.setattr(store_module, "HugePages", Pages)
    monkeypatch.setattr(store_module.os, "sched_getaffinity", lambda pid: set(range(16)))
    budget = store_module.HostBudget(lambda: 1 << 40, num_ranks)
    store = store_module.MemoryStore(1 << 20, CpuPlatform().host_link(), budget)
    runtime.code = 801
    store.allocate_in_background()
    assert store._making is not None
    assert store._making.exception(20) is not None
    runtime.code = 0
    store.ready()
    assert num_threads == [ahead, awaited]
    store.close()
