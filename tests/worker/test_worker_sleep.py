"""A worker on a CPU that sleeps and wakes through its methods, and then computes what it did before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from step_driver import admit, decode, engine_call, make_config, make_step, run, sampled, start

from ringcore.errors import CapacityError, ConfigError, InvalidRequestError, SleepingError
from ringcore.worker.rpc import call_rpc, rpc_methods
from ringcore.worker.worker import Worker

PROMPT = [11, 60, 23, 8, 90]
AWAY_1 = {"weights": "offloaded", "kv_cache": "discarded"}
AWAY_2 = {"weights": "discarded", "kv_cache": "discarded"}
BACK = {"weights": "resident", "kv_cache": "resident"}

Reference = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(params=[False, True], ids=["memory", "file"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any], tmp_path: Path) -> Iterator[Worker]:
    directory = {"sleep_directory": tmp_path} if request.param else {}
    worker = start(Worker(make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True, **directory), 0, None))
    yield worker
    worker.shutdown()
    assert not list(tmp_path.iterdir())


def change(worker: Worker, target: dict[str, str]) -> dict[str, float]:
    """Both phases, with values as they come off the wire."""
    return engine_call(worker, "prepare_memory", [target]) | engine_call(worker, "commit_memory")


def generate(worker: Worker, count: int) -> list[int]:
    first = sampled(run(worker, {0: len(PROMPT)}, new=[admit(0, PROMPT, range(1, 10))]))[0]
    tokens = [first, *decode(worker, [0], count - 1)[0]]
    worker.execute_model(make_step({}, finished=[0]))
    return tokens


def test_level_1_and_the_same_tokens(worker: Worker, tiny_llama: tuple[str, Any], reference: Reference) -> None:
    expected = reference(PROMPT, 12)
    assert generate(worker, 12) == expected
    assert call_rpc(worker, "memory_states") == BACK
    weights_bytes = 4 * sum(p.numel() for p in tiny_llama[1].parameters())
    pages = pages_of(worker)
    for _ in range(3):
        report = change(worker, AWAY_1)
        assert report["copied_bytes"] >= weights_bytes
        assert report["weights_freed_bytes"] >= report["copied_bytes"]
        assert report["kv_cache_freed_bytes"] >= worker.memory()["kv_cache_bytes"]
        assert "residue_bytes" not in report, "a CPU does not tell it apart"
        assert call_rpc(worker, "memory_states") == AWAY_1
        with pytest.raises(SleepingError, match="call wake_up"):
            generate(worker, 1)
        with pytest.raises(SleepingError, match="call wake_up"):
            worker.capture_graph()
        report = change(worker, BACK)
        assert report["mapped_bytes"] > report["copied_bytes"] >= weights_bytes
        worker.reset_rows()
        assert [tensor.data_ptr() for tensor in pages_of(worker)] == [tensor.data_ptr() for tensor in pages]
        assert not any(tensor.any() for tensor in pages)
        assert generate(worker, 12) == expected


def pages_of(worker: Worker) -> tuple[torch.Tensor, ...]:
    assert worker._runner is not None
    return tuple(worker._runner.paged.kv_caches.values())


def test_only_weights_are_in_the_arena_of_the_weights(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    assert worker._platform is not None
    used = worker._platform.arenas["weights"].used_bytes
    weights_bytes = 4 * sum(p.numel() for p in tiny_llama[1].parameters())
    assert 0 <= used - weights_bytes < 256 * len(list(tiny_llama[1].parameters())), "no more than the gaps"


def test_level_2_and_the_weights_written_again(worker: Worker, reference: Reference) -> None:
    """Tables and what else is no weight are still there."""
    assert worker._platform is not None
    arena = worker._platform.arenas["weights"]
    kept = arena.contents().clone()
    change(worker, AWAY_2)
    report = change(worker, BACK)
    assert "copied_bytes" not in report
    arena.contents().copy_(kept)
    assert generate(worker, 12) == reference(PROMPT, 12)


def test_a_roll_back_and_too_little_memory(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_call(worker, "prepare_memory", [AWAY_1])
    engine_call(worker, "roll_back_memory")
    engine_call(worker, "roll_back_memory")
    assert worker.memory_states() == BACK
    assert generate(worker, 5) == reference(PROMPT, 5)
    change(worker, AWAY_1)
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4096))
        with pytest.raises(CapacityError, match="weights: to be mapped again it needs") as error:
            engine_call(worker, "prepare_memory", [BACK])
    assert error.value.details["needed_bytes"] > error.value.details["available_bytes"] == 4096
    engine_call(worker, "roll_back_memory")
    assert worker.memory_states() == AWAY_1
    change(worker, {"kv_cache": "resident"})
    change(worker, BACK)
    worker.reset_rows()
    assert generate(worker, 12) == reference(PROMPT, 12)


def test_fifty_cycles_do_not_grow(worker: Worker, reference: Reference) -> None:
    process = psutil.Process()

    def figures() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), process.num_threads()

    for _ in range(3):
        change(worker, AWAY_1)
        change(worker, BACK)
    before, rss = figures(), process.memory_info().rss
    for _ in range(50):
        change(worker, AWAY_1)
        change(worker, BACK)
    assert figures() == before
    assert process.memory_info().rss - rss < 8 << 20
    worker.reset_rows()
    assert generate(worker, 12) == reference(PROMPT, 12)


def test_a_worker_may_end_asleep(tiny_llama: tuple[str, Any]) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    worker = start(Worker(make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True), 0, None))
    change(worker, AWAY_1)
    worker.prepare_memory(BACK)
    worker.shutdown()
    worker.shutdown()
    assert worker.memory_states() == BACK
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_without_the_option_nothing_can_be_given_back(tiny_llama: tuple[str, Any], reference: Reference) -> None:
    worker = Worker(make_config(tiny_llama[0], device="cpu"), 0, None)
    with pytest.raises(InvalidRequestError, match="call initialize_from_config first"):
        worker.prepare_memory(AWAY_1)
    start(worker)
    with pytest.raises(InvalidRequestError, match="start it with enable_sleep_mode=True"):
        worker.prepare_memory(AWAY_1)
    worker.roll_back_memory()
    assert worker.memory_states() == BACK
    assert generate(worker, 3) == reference(PROMPT, 3)
    worker.shutdown()


def test_the_states_can_be_asked_for_during_a_step(tiny_llama: tuple[str, Any]) -> None:
    assert rpc_methods(Worker(make_config(tiny_llama[0]), 0, None))["memory_states"].read_only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_sleep_mode": 1}, "enable_sleep_mode=1: give True or False"),
        ({"enable_sleep_mode": True, "device_memory": "plain"}, "enable_sleep_mode=True: device_memory='plain' has no"),
        ({"sleep_directory": "/tmp"}, "sleep_directory='/tmp': it is for sleep mode; give enable_sleep_mode=True too"),
        ({"enable_sleep_mode": True, "sleep_directory": "/none"}, "sleep_directory='/none': give an existing"),
        ({"enable_sleep_mode": True, "sleep_directory": 3}, "sleep_directory=3: give an existing directory"),
    ],
)
def test_options_that_cannot_work(tiny_llama: tuple[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tiny_llama[0], **options)
