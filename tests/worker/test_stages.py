"""Stages on the rows of a CPU and of a GPU write what one worker does, row by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import device_runner
import fake_graphs
import pytest
import torch
from step_driver import admit, execute, make_config, make_step

from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.worker.worker import Worker

PROMPT, OTHER = [5, 9, 14, 3, 77], [40, 2]
# Two rows by turns; a chunked prompt in between; a row that another request gets while a token of the first is on its
# way, where the other has one of its prompt; and one whose masks the last stage alone knows.
STEPS: Sequence[dict[str, Any]] = [
    {"scheduled": {0: 5, 1: 2}, "new": [admit(0, PROMPT, range(1, 6)), admit(1, OTHER, range(6, 10))]},
    {"scheduled": {0: 1}},
    {"scheduled": {1: 1}},
    {"scheduled": {2: 3, 0: 1}, "new": [admit(2, PROMPT, range(10, 14))]},
    {"scheduled": {1: 1, 2: 2}},
    {"scheduled": {0: 9}, "finished": [0], "new": [admit(0, [*PROMPT, 30, 31, 32, 33], range(14, 18))]},
    {"scheduled": {1: 1, 2: 1}},
    {"scheduled": {0: 1, 1: 1, 2: 1}},
    {
        "scheduled": {3: 5},
        "new": [admit(3, PROMPT, range(18, 22), params=SamplingParams(temperature=0, allowed_token_ids=[7, 8]))],
    },
    {"scheduled": {3: 1, 0: 1}},
    {"scheduled": {3: 1, 1: 1}},
]


def written(outputs: Sequence[ModelRunnerOutput | None]) -> list[list[int]]:
    assert all(output is None or not output.row_errors for output in outputs)
    return [output.token_ids.tolist() for output in outputs if output is not None]


def steps() -> list[SchedulerOutput]:
    return [make_step(**step, number=number) for number, step in enumerate(STEPS)]


@pytest.fixture
def stages(tiny_llama: tuple[str, Any], tmp_path: Path, kind: str) -> Iterator[list[Worker]]:
    """Started, two or three; all work in this thread, since Triton's interpreter is one: a stage before the next."""
    num_stages = 3 if kind == "host" else 2
    config = make_config(tiny_llama[0], device="cpu", pipeline_parallel_size=num_stages)
    workers = [Worker(config, rank, str(tmp_path / "rendezvous")) for rank in range(num_stages)]
    threads = [threading.Thread(target=worker.init_device, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for worker in workers:
        worker.load_model()
    for worker in workers:
        worker.initialize_from_config(planned(workers))
    yield workers
    for worker in workers:
        worker.shutdown()


def planned(workers: Sequence[Worker]) -> KVCacheConfig:
    return plan_kv_cache(
        [worker.get_kv_cache_spec() for worker in workers],
        [1 << 24] * len(workers),
        max_model_len=128,
        fit_max_model_len=False,
        max_tokens_in_flight=64,
        num_blocks_override=40,
        num_stages=len(workers),
    )


@pytest.fixture(params=["host", "device", "mixed", "graphs"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The rows of a CPU; of a GPU with decoding steps of its own; all of whose steps are mixed; with graphs."""
    if request.param != "host":
        device_runner.rows_on_device(monkeypatch, plans_on_device=request.param != "mixed")
    if request.param == "graphs":
        fake_graphs.decode_graphs_on_cpu(monkeypatch)
    return str(request.param)


def test_stages_write_what_one_worker_does(stages: list[Worker], tiny_llama: tuple[str, Any]) -> None:
    one = Worker(make_config(tiny_llama[0], device="cpu"), 0, None)
    one.init_device()
    one.load_model()
    one.initialize_from_config(planned([one]))
    expected = written([execute(one, step) for step in steps()])
    one.shutdown()
    outputs = [[execute(worker, step) for worker in stages] for step in steps()]
    assert not any(any(others) for *others, _ in outputs), "the last stage replies"
    assert written([last for *_, last in outputs]) == expected


def test_a_stage_goes_on_with_other_rows_before_tokens_are_back(stages: list[Worker]) -> None:
    """The first stage has launched three steps when the last one begins the first of them."""
    ahead = [steps()[0], *(make_step({row: 2}, new=[admit(row, OTHER, [9 + row])], number=row) for row in (2, 3))]
    first, *_, last = ([execute(worker, step) for step in ahead] for worker in stages)
    assert first == [None] * 3
    tokens = [row for output in written(last) for row in output]
    assert len(tokens) == 4
    assert tokens[1:] == [tokens[1]] * 3, "three rows have one prompt"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_row_that_is_not_finite_fails_alone(stages: list[Worker], stage: int) -> None:
    """In whichever stage it begins; what it has written is zeroed there and behind."""
    broken: Any = stages[stage]._runner
    forward = broken.paged.model.forward

    def breaking(inputs: torch.Tensor, *args: Any) -> torch.Tensor:
        out = forward(inputs, *args)
        out[:5] = float("nan")
        return out

    broken.paged.model.forward = breaking
    *_, output = (execute(worker, steps()[0]) for worker in stages)
    assert output is not None
    assert [(error.row, "not finite" in error.message) for error in output.row_errors] == [(0, True)]
    assert output.rows is not None
    assert output.rows.tolist() == [1]
    for worker in stages[stage:]:
        runner: Any = worker._runner
        for cache in runner.paged.kv_caches.values():
            assert torch.isfinite(cache).all()
            assert not cache[:, :, [1, 2]].any()
