"""Rows with drafts that are right, wrong and either: each token is the one that plain loops over one row's logits find,
whatever the row asks of its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, Asked, expected, some_requests
from device_runner import rows_on_device
from scripted_drafts import ScriptedDrafts
from step_driver import admit, make_config, make_step, start

from ringcore.errors import ConfigError
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_spans import RowSpans
from ringcore.worker.runner import draft_costs
from ringcore.worker.runner.host_launcher import HostLauncher
from ringcore.worker.worker import Worker

VOCAB_SIZE, ROW_BLOCKS, NUM_DRAFTS = 97, 8, 4
SPECULATIVE = {"method": "scripted_drafts:ScriptedDrafts", "num_drafts": NUM_DRAFTS}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    """gpu: its runner, by interpreted kernels."""
    config = make_config(tiny_llama[0], logits_processors=PROCESSORS, speculative=SPECULATIVE, max_num_seqs=14)
    patch = pytest.MonkeyPatch()
    if request.param == "gpu":
        rows_on_device(patch, plans_on_device=True)
        patch.setattr(draft_costs, "COST_SIZES", (1, 2))
    worker = start(Worker(config, 0, None), num_blocks=1 + 14 * ROW_BLOCKS)
    assert worker._runner is not None
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)  # type: ignore[assignment]
    patch.undo()
    yield worker
    worker.shutdown()


def write(worker: Worker, requests: list[Asked], rng: random.Random, seen: list[Any] | None = None) -> tuple[int, int]:
    """Computes all requests side by side, by a GPU's runner two steps at once; -> tokens that they gained, and drafts
    that were verified."""
    depth = 1 if isinstance(worker._runner.launcher, HostLauncher) else 2  # type: ignore[union-attr]
    num_gained = num_drafts = 0
    new = [
        msgspec.structs.replace(
            admit(
                row,
                asked.prompt,
                range(1 + row * ROW_BLOCKS, 1 + (row + 1) * ROW_BLOCKS),
                params=asked.params,
                stop_token_ids=[EOS],
                bad_words=asked.bad_words,
            ),
            seed=asked.seed,
        )
        for row, asked in enumerate(requests)
    ]
    step, rows = make_step({row: len(asked.prompt) for row, asked in enumerate(requests)}, new=new), [*range(len(new))]
    ahead: list[tuple[Any, list[int]]] = []
    while rows or ahead:
        if rows:
            most = int_array([rng.randint(1, 1 + NUM_DRAFTS) for _ in rows])
            ahead.append((worker.execute_model(msgspec.structs.replace(step, max_gained=most)), [*rows]))
        over: list[int] = []
        if len(ahead) >= depth or not rows:
            launched, scheduled = ahead.pop(0)
            output = launched.result()
            assert output is not None
            assert output.row_errors == []
            spans = RowSpans(1, output.num_gained)
            for index, row in enumerate(scheduled):
                for token in output.token_ids[spans.slice_of(index)].tolist():
                    if not requests[row].is_done:
                        requests[row].written.append(token)
            num_gained += len(output.token_ids)
            num_drafts += 0 if output.num_drafts is None else int(output.num_drafts.sum())
            if seen is not None:
                seen += output.logprobs or []
            over = [row for row in rows if requests[row].is_done]
            rows = [row for row in rows if row not in over]
        rng.shuffle(rows)
        step = make_step(dict.fromkeys(rows, 1), finished=over)
    worker.reset_rows()
    return num_gained, num_drafts


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


def guess(texts: list[list[int]], chance: float, rng: random.Random) -> Callable[[list[int], int], list[int]]:
    def script(tokens: list[int], most: int) -> list[int]:
        rest = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
        rest += [2] * (most - len(rest))
        return [token if rng.random() < chance else (token + 5) % VOCAB_SIZE for token in rest[:most]]

    return script


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
