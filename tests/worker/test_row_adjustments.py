"""Rows with adjusted logits among plain ones, on the CPU's runner and on the GPU's: every token is the one that plain
loops over one row's logits find, however the rows are batched, chunked, preempted and launched ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, Asked, Driver, expected, some_requests
from device_runner import rows_on_device
from fake_graphs import decode_graphs_on_cpu
from step_driver import make_config, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.worker.worker import Worker

VOCAB_SIZE, ROW_BLOCKS = 97, 8


@pytest.fixture(params=[("cpu", 1), ("gpu", 2)], ids=["cpu", "gpu"])
def ahead(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The runner, and the messages that are sent before the first one's tokens are taken."""
    runner: tuple[str, int] = request.param
    return runner


@pytest.fixture
def worker(ahead: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    if ahead[0] == "gpu":
        rows_on_device(monkeypatch, plans_on_device=True)
    config = make_config(tiny_llama[0], max_num_seqs=5, logits_processors=PROCESSORS)
    worker = start(Worker(config, 0, None), num_blocks=1 + 5 * ROW_BLOCKS)
    assert worker._runner is not None
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)  # type: ignore[assignment]
    yield worker
    worker.shutdown()


def test_every_row_writes_what_it_would_alone(
    worker: Worker, tiny_llama: tuple[str, Any], ahead: tuple[str, int]
) -> None:
    rng = random.Random(7)
    requests = some_requests(rng)
    driver = Driver(worker, requests, ahead[1], rng)
    driver.run()
    assert driver.num_preempted > 0
    for asked in requests:
        assert asked.written == expected(tiny_llama[1], asked), asked.params
    assert worker._runner is not None
    worker.reset_rows()
    assert not worker._runner.adjustments.is_adjusted.any()
    assert not worker._runner.adjustments.needs_token_ids.any()


def test_graphs_of_whole_steps_and_of_begun_ones(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding steps by what stands in for graphs, with adjusted rows and then without."""
    rows_on_device(monkeypatch, plans_on_device=True)
    decode_graphs_on_cpu(monkeypatch)
    worker = start(Worker(make_config(tiny_llama[0], max_num_seqs=5, block_size=8), 0, None))
    adjusted = SamplingParams(temperature=0, frequency_penalty=2.0, allowed_token_ids=[5, 6, 7], max_tokens=None)
    for params in (adjusted, SamplingParams(temperature=0, max_tokens=None)):
        requests = [Asked([9, 12, 30 + i], params if i else adjusted) for i in range(3)]
        requests[0].params = params
        Driver(worker, requests, 2, random.Random(3)).run()
        for asked in requests:
            assert asked.written == expected(tiny_llama[1], asked)
        worker.reset_rows()
    worker.shutdown()
