"""Log-probabilities of prompts, in chunks and beside others, against transformers' on whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_runner import rows_on_device
from step_driver import admit, make_config, make_step, run, sampled, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.requests import PromptLogprobs
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.worker.logits import prompt_logprobs, sampling_stage
from ringcore.worker.worker import Worker

VOCAB_SIZE = 97
LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]


@pytest.fixture(params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    if request.param == "gpu":
        rows_on_device(request.getfixturevalue("monkeypatch"), plans_on_device=True)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    yield worker
    worker.shutdown()


def asking(row: int, tokens: list[int], blocks: Any, count: int | None, **others: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=count)
    return admit(row, tokens, blocks, params=params, **others)


def check(found: PromptLogprobs, prompt: list[int], count: int, model: Any) -> None:
    """`found` against the log-probabilities of one whole pass."""
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert found.count == count
    shape = len(prompt) - 1, 1 + count
    assert (found.token_ids.dtype, found.logprobs.dtype, found.ranks.dtype) == (np.int32, np.float32, np.int32)
    ids, logprobs, ranks = (column.reshape(shape) for column in (found.token_ids, found.logprobs, found.ranks))
    assert ids[:, 0].tolist() == prompt[1:]
    best = expected.topk(count)
    assert ids[:, 1:].tolist() == best.indices.tolist()
    assert logprobs == pytest.approx(expected.gather(1, torch.tensor(ids).long()).numpy(), abs=1e-4)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    assert ranks[:, 0].tolist() == ((expected > own).sum(-1) + 1).tolist()
    assert ranks[:, 1:].tolist() == [list(range(1, 1 + count))] * len(ids)


@pytest.mark.parametrize("chunks", [[15], [5, 7, 3], [14, 1], [1, 1, 13]])
@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_a_prompt_in_chunks_and_pieces(
    worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, chunks: list[int], at_once: int
) -> None:
    monkeypatch.setattr(prompt_logprobs, "positions_at_once", lambda vocab_size, count: at_once)
    outputs = [run(worker, {3: chunks[0]}, new=[asking(3, LONG, range(1, 6), 3)])]
    outputs += [run(worker, {3: n}) for n in chunks[1:]]
    assert [output.prompt_logprobs for output in outputs[:-1]] == [[]] * (len(chunks) - 1)
    (found,) = outputs[-1].prompt_logprobs
    assert found.row == 3
    check(found, LONG, 3, tiny_llama[1])
    assert run(worker, {3: 1}).prompt_logprobs == []


def test_rows_that_ask_beside_rows_that_do_not(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    """One decodes meanwhile, one asks for all there are, one has but one token, and one is not through."""
    run(worker, {5: 4}, new=[asking(5, LONG[:4], [1, 2], None)])
    new = [
        asking(2, LONG[3:12], [3, 4, 5], -1),
        asking(0, LONG[:1], [6], 2),
        asking(4, LONG, range(7, 12), 0),
        asking(1, LONG[5:9], [12, 13], None),
    ]
    output = run(worker, {4: 7, 2: 9, 5: 1, 0: 1, 1: 4}, new=new)
    assert set(sampled(output)) == {2, 5, 0, 1}
    found = {one.row: one for one in output.prompt_logprobs}
    assert set(found) == {2, 0}
    check(found[2], LONG[3:12], VOCAB_SIZE, tiny_llama[1])
    check(found[0], LONG[:1], 2, tiny_llama[1])
    output = run(worker, {4: 8, 2: 1})
    (rest,) = output.prompt_logprobs
    check(rest, LONG, 0, tiny_llama[1])
    wire = decoder(ModelRunnerOutput).decode(encoder().encode(output))
    check(wire.prompt_logprobs[0], LONG, 0, tiny_llama[1])


def test_a_row_that_ends_or_begins_again(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    """Of one that was preempted before its first token they are made anew; of one after it they were sent."""
    run(worker, {0: 6}, new=[asking(0, LONG, range(1, 6), 1)])
    new = [asking(1, LONG[:9], range(1, 5), 1), asking(0, LONG, range(6, 11), None)]
    output = run(worker, {1: 9, 0: 15}, finished=[0], new=new)
    (found,) = output.prompt_logprobs  # the row that left asked, not the one that has its place
    check(found, LONG[:9], 1, tiny_llama[1])
    token = sampled(output)[1]
    again = asking(2, [*LONG[:9], token], range(1, 5), 1, num_prompt_tokens=9)
    assert run(worker, {2: 10}, finished=[1], new=[again]).prompt_logprobs == []


def test_all_logprobs_of_what_is_sampled(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    """Beside a row that asks for two."""
    params = [SamplingParams(temperature=0, max_tokens=None, logprobs=count) for count in (-1, 2)]
    new = [admit(row, LONG[row : row + 6], [1 + 2 * row, 2 + 2 * row], params=params[row]) for row in range(2)]
    output = run(worker, {0: 6, 1: 6}, new=new)
    assert output.logprobs is not None
    for row, count in enumerate((VOCAB_SIZE, 2)):
        found = output.logprobs[row]
        assert found is not None
        with torch.inference_mode():
            expected = tiny_llama[1](torch.tensor([LONG[row : row + 6]])).logits[0, -1].log_softmax(-1).topk(count)
        assert found.token_ids == [sampled(output)[row], *expected.indices.tolist()]
        assert found.logprobs[1:] == pytest.approx(expected.values.tolist(), abs=1e-4)
        assert found.ranks == [1, *range(1, 1 + count)]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_only_the_output_rank_keeps_them(
    tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The others compute the logits, which all ranks do together, and none of what would be sent."""

    def fail(*args: Any) -> None:
        raise AssertionError

    if device == "gpu":
        rows_on_device(monkeypatch, plans_on_device=True)
    monkeypatch.setattr(sampling_stage, "launch_logprobs", fail)
    monkeypatch.setattr(prompt_logprobs, "logprob_tensors", fail)
    silent = start(Worker(make_config(tiny_llama[0]), 0, None), rank=1)
    assert silent._runner is not None
    positions: list[int] = []
    compute_logits = silent._runner._stages.prompt_logprobs._compute_logits
    monkeypatch.setattr(
        silent._runner._stages.prompt_logprobs,
        "_compute_logits",
        lambda hidden: positions.append(len(hidden)) or compute_logits(hidden),
    )
    params = SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=2, logprobs=2)
    new = admit(0, LONG, range(1, 6), params=params)
    outputs = [silent.execute_model(make_step({0: n}, new=[new] if n == 9 else [])) for n in (9, 6, 1)]
    assert [output.result() for output in outputs] == [None] * 3
    assert positions == [9, 5]
    assert not silent._runner._stages.prompt_logprobs._pending
    silent.shutdown()


def test_pieces_are_bounded() -> None:
    assert prompt_logprobs.positions_at_once(151_936, 20) == 110
    assert prompt_logprobs.positions_at_once(151_936, 151_936) * 151_936 * 44 < 64 << 20
    assert prompt_logprobs.positions_at_once(10_000_000, 10_000_000) == 1
