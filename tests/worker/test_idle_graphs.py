"""Graphs that are captured between steps: the largest first, one a call, and no row, token or step notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import fake_graphs
import pytest
import torch
from device_runner import rows_on_device
from fake_graphs import capture_at_once, decode_graphs_on_cpu
from step_driver import admit, decode, engine_call, make_config, run, sampled, start

from ringcore.worker.worker import Worker

PROMPTS = [[11, 60, 23, 8, 90], [4, 8, 15]]
Reference = Callable[[Sequence[int], int], list[int]]


@pytest.fixture
def worker(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Five sizes of decoding steps, of which the smallest is there; no mixed ones: a CPU's backend plans none."""
    rows_on_device(monkeypatch, plans_on_device=True)
    decode_graphs_on_cpu(monkeypatch)
    capture_at_once(monkeypatch)
    from ringcore.worker.runner import decode_graphs

    monkeypatch.setattr(decode_graphs, "_COMMON_SIZES", (1,))
    worker = start(Worker(make_config(tiny_llama[0], max_num_seqs=9), 0, None))
    yield worker
    worker.shutdown()


def begin(worker: Worker) -> dict[int, list[int]]:
    """Two rows with a token each."""
    new = [admit(0, PROMPTS[0], range(1, 9)), admit(3, PROMPTS[1], range(9, 17))]
    written = sampled(run(worker, {0: 5, 3: 3}, new=new))
    return {row: [token] for row, token in written.items()}


def go_on(worker: Worker, written: dict[int, list[int]], count: int) -> None:
    for row, tokens in decode(worker, list(written), count).items():
        written[row] += tokens


def decode_sizes(worker: Worker) -> list[int]:
    runner: Any = worker._runner
    return list(runner.launcher._decode._graphs)


def test_common_sizes_are_there_before_the_first_request(
    tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_on_device(monkeypatch, plans_on_device=True)
    decode_graphs_on_cpu(monkeypatch)
    worker = start(Worker(make_config(tiny_llama[0], max_num_seqs=9), 0, None))
    assert decode_sizes(worker) == [8, 4, 2, 1], "the largest first"
    assert worker.stats()["num_graphs_left"] == 1
    worker.shutdown()


def test_one_a_call_the_largest_first(worker: Worker, reference: Reference) -> None:
    assert worker.stats()["num_graphs_left"] == 4
    written = begin(worker)
    assert engine_call(worker, "capture_graph") == 3
    go_on(worker, written, 1)  # captures the size of two rows itself
    assert decode_sizes(worker) == [1, 9, 2]
    assert [engine_call(worker, "capture_graph") for _ in range(3)] == [1, 0, 0]
    assert decode_sizes(worker) == [1, 9, 2, 8, 4]
    assert worker.stats()["num_graphs_left"] == 0
    go_on(worker, written, 6)
    assert written == {0: reference(PROMPTS[0], 8), 3: reference(PROMPTS[1], 8)}


def test_more_captures_than_the_ring_has_slots(worker: Worker, reference: Reference) -> None:
    runner: Any = worker._runner
    written = begin(worker)
    with torch.inference_mode():
        for _ in range(runner.launcher.ring.num_slots + 1):
            runner.launcher._decode._capture_step(2)
    go_on(worker, written, 5)
    assert written == {0: reference(PROMPTS[0], 6), 3: reference(PROMPTS[1], 6)}


def test_a_capture_amid_requests_writes_into_no_block(worker: Worker, reference: Reference) -> None:
    """Its dummy run has no rows: the last batch's has left, and its blocks are another row's by now."""
    run(worker, {0: 3}, new=[admit(0, PROMPTS[1], range(1, 6))])
    decode(worker, [0], 2)
    prompt = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[0]]
    new = admit(1, prompt, range(1, 6), bad_words=[[90, 90, 90]])  # adjusted: the first step of its kind
    first = sampled(run(worker, {1: 13}, finished=[0], new=[new]))
    assert worker._runner is not None
    caches = tuple(worker._runner.paged.kv_caches.values())
    before = [cache[:, :, [1, 2, 3]].clone() for cache in caches]
    second = sampled(run(worker, {1: 1}))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, :, [1, 2, 3]], old)
    assert [first[1], second[1]] == reference(prompt, 2)


@pytest.mark.parametrize("has_run", [False, True], ids=["before it ran", "after it ran"])
def test_a_capture_that_fails_disturbs_no_step(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    from ringcore.worker.runner import graph_capture

    def fail(work: Callable[[], Any], pool: None, after_warm_up: Callable[[], object] = lambda: None) -> Any:
        if has_run:
            fake_graphs.captured(work, pool, after_warm_up)
        raise torch.OutOfMemoryError("CUDA out of memory")

    written = begin(worker)
    with monkeypatch.context() as patch:
        patch.setattr(graph_capture, "capture", fail)
        with pytest.raises(torch.OutOfMemoryError):
            worker.capture_graph()
    assert worker.stats()["num_graphs_left"] == 4
    go_on(worker, written, 4)
    assert written == {0: reference(PROMPTS[0], 5), 3: reference(PROMPTS[1], 5)}


def test_mixed_steps_follow_decoding_ones(worker: Worker) -> None:
    from ringcore.worker.runner.mixed_graphs import MixedGraphs
    from ringcore.worker.runner.paged_model import PagedModel

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, ctx: object) -> torch.Tensor:
        assert not input_ids.any()
        assert not positions.any()
        lens.append(len(input_ids))
        return torch.zeros(len(input_ids), 4)

    lens: list[int] = []
    runner: Any = worker._runner
    new_inputs = runner.paged.model.new_inputs
    model: Any = SimpleNamespace(forward=forward, new_inputs=new_inputs)
    launcher = runner.launcher
    launcher._mixed = MixedGraphs(PagedModel(model, (), {}, {}), launcher._device_rows, 64)
    assert worker.stats()["num_graphs_left"] == 7
    left = [worker.capture_graph() for _ in range(4)]
    assert lens == [], "they are captured last"
    left += [worker.capture_graph() for _ in range(3)]
    assert left == [6, 5, 4, 3, 2, 1, 0]
    assert decode_sizes(worker) == [1, 9, 8, 4, 2]
    assert lens == [64, 32, 16]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_cpu_has_none(tiny_llama: tuple[str, Any], enforce_eager: bool) -> None:
    worker = start(Worker(make_config(tiny_llama[0], device="cpu", enforce_eager=enforce_eager), 0, None))
    assert worker.capture_graph() == worker.stats()["num_graphs_left"] == 0
    worker.shutdown()
