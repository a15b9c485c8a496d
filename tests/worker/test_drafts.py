"""Rows with drafts that are right, wrong and either: each token is the one that plain loops over one row's logits find,
whatever the row asks of its tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, VOCAB_SIZE, Asked, expected, some_requests
from device_runner import rows_on_device
from drafted_rows import MAX_TOKENS, SPECULATIVE, guess, write
from scripted_drafts import ScriptedDrafts
from step_driver import admit, break_embedding, make_config, make_step, start

from ringcore.errors import ConfigError
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.worker.runner import draft_costs
from ringcore.worker.worker import Worker


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    """gpu: its runner, by interpreted kernels."""
    config = make_config(tiny_llama[0], logits_processors=PROCESSORS, speculative=SPECULATIVE, max_num_seqs=14)
    patch = pytest.MonkeyPatch()
    if request.param == "gpu":
        rows_on_device(patch, plans_on_device=True)
        patch.setattr(draft_costs, "COST_SIZES", (1, 2))
    worker = start(Worker(config, 0, None), num_blocks=1 + 14 * MAX_TOKENS // 4)
    assert worker._runner is not None
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)  # type: ignore[assignment]
    patch.undo()
    yield worker
    worker.shutdown()


@pytest.mark.parametrize(
    ("worker", "chance"), [("cpu", 0.0), ("cpu", 0.6), ("cpu", 1.0), ("gpu", 0.6)], indirect=["worker"]
)
def test_every_row_writes_what_it_would_alone(
    worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, chance: float
) -> None:
    """chance: that a draft is right."""
    rng = random.Random(3)
    requests = some_requests(rng)
    due = [(asked, [*asked.prompt, *expected(tiny_llama[1], asked)]) for asked in requests]
    monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(guess([whole for _, whole in due], chance, rng)))
    monkeypatch.setattr(ScriptedDrafts, "may_propose", lambda *_: rng.random() < 0.7)
    _, num_drafts = write(worker, requests, rng)
    for asked, whole in due:
        assert asked.written == whole[len(asked.prompt) :], asked.params
    assert num_drafts > len(requests)


def test_right_drafts_are_all_accepted_and_wrong_ones_none(
    worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked([5, 9, 30], SamplingParams(temperature=0.9, logprobs=3, max_tokens=None), seed=8)
    whole = [*asked.prompt, *expected(tiny_llama[1], asked)]
    found: dict[float, list[Any]] = {}
    for chance in (1.0, 0.0):
        one = Asked(asked.prompt, asked.params, seed=8)
        script = guess([whole], chance, random.Random(1))
        monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(script))
        found[chance] = []
        num_gained, num_drafts = write(worker, [one], random.Random(2), found[chance])
        assert one.written == whole[3:]
        assert num_drafts > 0
        assert len(found[chance]) == num_gained
        if chance == 0:
            assert num_gained - len(one.written) in (0, 1), "a step more was sent before the last was read"
    for right, wrong in zip(*found.values(), strict=False):
        assert right.token_ids == wrong.token_ids
        assert right.ranks == wrong.ranks
        assert right.logprobs == pytest.approx(wrong.logprobs, abs=1e-4)


def test_a_draft_that_is_not_finite_ends_its_row_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of token 96 is NaN; the row's keys and values are zeroed, those of drafts too."""
    break_embedding(monkeypatch, worker, 96)
    script = staticmethod(lambda known, most: [96] * most if known[0] == 5 else [])
    monkeypatch.setattr(ScriptedDrafts, "script", script)
    new = [admit(0, [5, 9, 30], range(1, 5)), admit(1, [7, 8, 9, 10, 11], range(5, 9))]
    first = worker.execute_model(make_step({0: 3, 1: 5}, new=new)).result()
    step = msgspec.structs.replace(make_step({0: 1, 1: 1}), max_gained=int_array([3, 3]))
    output = worker.execute_model(step).result()
    assert first.row_errors == []
    assert [error.row for error in output.row_errors] == [0]
    assert output.rows.tolist() == [1]
    assert all(torch.isfinite(cache).all() for cache in worker._runner.paged.kv_caches.values())  # type: ignore[union-attr]
    worker.reset_rows()


@pytest.mark.parametrize("worker", ["gpu"], indirect=True)
def test_a_step_whose_drafts_would_not_pay_is_launched_ahead(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(lambda tokens, most: [7] * most))
    drafts: Any = worker._runner.launcher._drafts  # type: ignore[union-attr]
    most = int_array([3])
    sent = [worker.execute_model(make_step({0: 3}, new=[admit(0, [5, 9, 30], range(1, 9))]))]
    unread = []
    for may_propose in (False, False, True, False, False):
        monkeypatch.setattr(ScriptedDrafts, "may_propose", lambda *_, may=may_propose: may)
        sent.append(worker.execute_model(msgspec.structs.replace(make_step({0: 1}), max_gained=most)))
        unread.append(sum(step.words is None for step in drafts._unfollowed))
    assert unread == [2, 2, 1, 1, 2], "the step before is read where drafts would pay, one with drafts always"
    outputs = [launched.result() for launched in sent]
    assert [output.num_drafts is not None for output in outputs] == [False, False, False, True, False, False]
    worker.reset_rows()


def test_a_name_that_is_no_proposer(tiny_llama: tuple[str, Any]) -> None:
    config = make_config(tiny_llama[0], speculative={"method": "scripted_drafts:Drafts"})
    with pytest.raises(ConfigError, match=r"scripted_drafts:Drafts.*no subclass"):
        start(Worker(config, 0, None))
