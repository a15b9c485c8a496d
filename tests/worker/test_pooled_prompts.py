"""Hidden states of prompts, pooled in chunks and beside others, against transformers' on whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_runner import rows_on_device
from step_driver import admit, make_config, run, sampled, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.requests import PooledPrompt
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.worker.worker import Worker

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]


@pytest.fixture(params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    if request.param == "gpu":
        rows_on_device(request.getfixturevalue("monkeypatch"), plans_on_device=True)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    yield worker
    worker.shutdown()


def asking(row: int, tokens: list[int], blocks: Any, pooling: Any, **others: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=None, pooling=pooling)
    return admit(row, tokens, blocks, params=params, **others)


def check(found: PooledPrompt, prompt: list[int], pooling: str, model: Any) -> None:
    """`found` against the hidden states of one whole pass."""
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0].float()
    expected = states[-1] if pooling == "last" else states.mean(0)
    assert found.values.dtype == np.float32
    assert found.values == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunks", [[15], [5, 7, 3], [14, 1], [1, 1, 13]])
def test_a_prompt_in_chunks(worker: Worker, tiny_llama: tuple[str, Any], chunks: list[int], pooling: str) -> None:
    outputs = [run(worker, {3: chunks[0]}, new=[asking(3, PROMPT, range(1, 6), pooling)])]
    outputs += [run(worker, {3: n}) for n in chunks[1:]]
    assert [output.pooled for output in outputs[:-1]] == [[]] * (len(chunks) - 1)
    wire = decoder(ModelRunnerOutput).decode(encoder().encode(outputs[-1]))
    (found,) = wire.pooled
    assert found.row == 3
    check(found, PROMPT, pooling, tiny_llama[1])
    assert run(worker, {3: 1}).pooled == []


def test_rows_that_ask_beside_rows_that_do_not(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    """One decodes meanwhile, one has but one token, one begins behind a prefix that is cached, one begins again."""
    run(worker, {5: 4, 0: 6}, new=[asking(5, PROMPT[:4], [1, 2], None), asking(0, PROMPT, range(21, 26), "mean")])
    prompts = {2: PROMPT[3:12], 1: PROMPT[:1], 0: PROMPT[:9]}
    new = [
        asking(2, prompts[2], [3, 4, 5], "mean"),
        asking(1, prompts[1], [6], "last"),
        asking(0, prompts[0], range(26, 30), "mean"),
    ]
    output = run(worker, {2: 9, 5: 1, 1: 1, 0: 9}, finished=[0], new=new)
    assert set(sampled(output)) == {2, 5, 1, 0}
    found = {one.row: one for one in output.pooled}
    assert set(found) == {2, 1, 0}
    for row, pooling in ((2, "mean"), (1, "last"), (0, "mean")):
        check(found[row], prompts[row], pooling, tiny_llama[1])
    again = asking(2, [*prompts[2], sampled(output)[2]], [3, 4, 5], "mean", num_prompt_tokens=9)
    assert run(worker, {2: 10}, finished=[2], new=[again]).pooled == []
    behind = asking(4, PROMPT[:9], range(26, 30), "last", computed=8)
    (found_behind,) = run(worker, {4: 1, 5: 1}, new=[behind]).pooled
    check(found_behind, PROMPT[:9], "last", tiny_llama[1])
