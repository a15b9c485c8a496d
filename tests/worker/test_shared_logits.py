"""Graphs of all sizes leave their logits in one place; tokens and log-probabilities are those without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_runner import rows_on_device
from fake_graphs import capture_at_once
from step_driver import admit, make_config, run, start

from ringcore.errors import ConfigError
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.worker.worker import Worker

PLAIN = SamplingParams(temperature=0, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, top_k=20, seed=5, logprobs=1)
ADJUSTED = SamplingParams(temperature=0, frequency_penalty=2.0, logprobs=2)
# The rows of each step after the prompts: all sizes, up and down, with and without the row that is adjusted.
STEPS = ([0, 1, 2, 3, 4], [0], [0, 1, 2], [3, 4], [0, 1, 2, 3], [3], [0, 4], [0, 1, 2, 3, 4])


class Replayed:
    """In place of a captured graph: `replay` does the work again."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.replay = work

    def pool(self) -> str:
        return "the pool"


def outputs(worker: Worker) -> list[ModelRunnerOutput]:
    params = [PLAIN, DRAWN, PLAIN, ADJUSTED, PLAIN]
    prompts = [[9, 12, 30 + row][: 1 + row % 3] for row in range(5)]
    new = [admit(row, prompts[row], [1 + 4 * row + i for i in range(4)], params=params[row]) for row in range(5)]
    steps = [run(worker, {row: len(prompt) for row, prompt in enumerate(prompts)}, new=new)]
    return steps + [run(worker, dict.fromkeys(rows, 1)) for rows in STEPS]


def assert_same(found: list[ModelRunnerOutput], expected: list[ModelRunnerOutput]) -> None:
    """But for the last bits of log-probabilities: a product of more rows may add up in another order."""
    for one, other in zip(found, expected, strict=True):
        assert (one.rows.tolist(), one.token_ids.tolist()) == (other.rows.tolist(), other.token_ids.tolist())
        assert (one.row_errors, one.prompt_logprobs) == (other.row_errors, other.prompt_logprobs) == ([], [])
        for told, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert (told.token_ids, told.ranks) == (wanted.token_ids, wanted.ranks)
            assert told.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


@pytest.fixture
def worker_of(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Worker]:
    rows_on_device(monkeypatch, plans_on_device=True)
    return lambda: start(Worker(make_config(tiny_llama[0], max_num_seqs=5), 0, None))


def test_sizes_share_their_logits(worker_of: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcore.worker.runner import decode_graphs, device_launcher, graph_capture

    eager = worker_of()
    expected = outputs(eager)
    eager.shutdown()

    def captured(work: Callable[[], Any], pool: Any, after_warm_up: Callable[[], object] = lambda: None) -> Any:
        pools.append(pool)
        result = work()
        after_warm_up()
        return Replayed(work), result  # what it returned itself, not a copy

    pools: list[Any] = []
    capture_at_once(monkeypatch)
    monkeypatch.setattr(graph_capture, "capture", captured)
    monkeypatch.setattr(device_launcher, "DecodeStep", decode_graphs.DecodeGraphs)
    worker = worker_of()
    found = outputs(worker)
    assert_same(found, expected)
    assert all(output.logprobs for output in found)
    assert pools == [None] + ["the pool"] * (len(pools) - 1), "the first graph's, for all"
    graphs: Any = worker._runner
    graphs = graphs.launcher._decode
    assert (set(graphs._graphs), set(graphs._logits_graphs)) == ({1, 2, 4}, {1, 2, 4, 5})
    assert graphs._logits.shape == (5, 97)
    for size, graph in graphs._graphs.items():
        logits, _ = graph.results
        assert logits.shape == (size, 97)
        assert logits.data_ptr() == graphs._logits.data_ptr()
    worker.shutdown()


def test_a_step_whose_graph_is_missing_takes_a_larger_one_or_none(
    worker_of: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringcore.worker.runner import decode_graphs, device_launcher, graph_capture

    eager = worker_of()
    expected = outputs(eager)
    eager.shutdown()
    replayed: list[int] = []

    def captured(work: Callable[[], Any], pool: Any, after_warm_up: Callable[[], object] = lambda: None) -> Any:
        result = work()
        after_warm_up()
        return Replayed(lambda: replayed.append(len(work()[1]))), result

    monkeypatch.setattr(graph_capture, "capture", captured)
    monkeypatch.setattr(device_launcher, "DecodeStep", decode_graphs.DecodeGraphs)
    monkeypatch.setattr(decode_graphs, "_COMMON_SIZES", (2,))
    worker = worker_of()
    assert_same(outputs(worker), expected)
    graphs: Any = worker._runner
    graphs = graphs.launcher._decode
    assert (set(graphs._graphs), set(graphs._logits_graphs)) == ({2}, set())
    assert replayed == [2, 2]  # of one row, and of two; those of 3 and 5 are launched, as those are that are adjusted
    worker.shutdown()


def test_every_capture_is_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cuBLAS has a workspace for every stream that it was ever used on, and keeps it."""
    from ringcore.worker.runner import graph_capture

    seen: list[Any] = []
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    for pool in (None, "a pool"):
        graph, result = graph_capture.capture(
            lambda: seen.append((fake.current, fake.is_capturing)) or "out", pool, lambda: seen.append("warm")
        )
        assert (graph, result) == ("graph", "out")
    assert seen == [("side", False), "warm", ("side", True)] * 2
    assert fake.pools == [None, "a pool"]
    assert fake.waits == [("side", "main"), ("main", "side")] * 2


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            RuntimeError("Cannot copy between CPU and CUDA tensors\nmore"),
            r"CPU and CUDA tensors\); give enforce_eager=True",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "^CUDA out of memory$"),
    ],
)
def test_what_cannot_be_captured_is_an_error_of_the_option(monkeypatch, raised: Exception, expected: str) -> None:
    from ringcore.worker.runner import graph_capture

    fake = FakeCuda()
    fake.fails_at_the_end = True
    monkeypatch.setattr(torch, "cuda", fake)

    def run() -> None:
        if fake.is_capturing:
            raise raised

    is_memory = isinstance(raised, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError if is_memory else ConfigError, match=expected):
        graph_capture.capture(run, None)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.waits.append((self.name, other.name))

    def __enter__(self) -> None:
        self._cuda.current = self.name

    def __exit__(self, *error: object) -> None:
        self._cuda.current = "main"


class FakeCuda:
    """Of torch.cuda what a capture needs. It has no other stream than torch's own for captures."""

    def __init__(self) -> None:
        self.current, self.is_capturing, self.fails_at_the_end = "main", False, False
        self.pools: list[Any] = []
        self.waits: list[tuple[str, str]] = []
        self.capture_stream = FakeStream(self, "side")

    def CUDAGraph(self) -> str:
        return "graph"

    def graph(self, graph: str, pool: Any = None) -> FakeCuda:
        self.pools.append(pool)
        return self

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current)

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def __enter__(self) -> None:
        self.current, self.is_capturing = self.capture_stream.name, True

    def __exit__(self, *error: object) -> None:
        self.current, self.is_capturing = "main", False
        if self.fails_at_the_end:
            raise RuntimeError("operation failed due to a previous error during capture")
