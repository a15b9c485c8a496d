"""Steps that are read after others were launched: what a read changes is its own request's, not that of the next in the
row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from device_runner import rows_on_device
from step_driver import admit, break_embedding, decode, make_config, make_step, run, sampled, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.worker.worker import Worker

Reference = Callable[[Sequence[int], int], list[int]]

LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]
SHORT = [11, 60, 23]
POISON = 96


@pytest.fixture
def worker(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """The embedding of a token is NaN."""
    rows_on_device(monkeypatch, plans_on_device=True)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    break_embedding(monkeypatch, worker, POISON)
    yield worker
    worker.shutdown()


def test_the_pages_of_the_next_request_are_not_zeroed(worker: Worker, reference: Reference) -> None:
    bad = worker.execute_model(make_step({0: 4}, new=[admit(0, [*SHORT, POISON], [1, 2])]))
    new = admit(0, LONG, range(1, 7))
    good = worker.execute_model(make_step({0: 15}, finished=[0], new=[new]))
    told, first = bad.result(), good.result()
    assert told is not None
    assert first is not None
    assert [error.row for error in told.row_errors] == [0]
    assert first.row_errors == []
    assert [*first.token_ids.tolist(), *decode(worker, [0], 5)[0]] == reference(LONG, 6)


def test_a_row_that_has_left(worker: Worker, reference: Reference) -> None:
    """Its blocks are no longer known; who gets them next writes them before it reads them."""
    run(worker, {0: 3}, new=[admit(0, [*SHORT, POISON], [1, 2])])
    bad = worker.execute_model(make_step({0: 1}))
    left = worker.execute_model(make_step({}, finished=[0]))
    told = bad.result()
    assert told is not None
    assert [error.row for error in told.row_errors] == [0]
    assert left.result() is not None
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, range(1, 7))]))
    assert [first[0], *decode(worker, [0], 3)[0]] == reference(LONG, 4)


def test_the_tokens_of_the_next_request_are_not_overwritten(worker: Worker, reference: Reference) -> None:
    """Both need their tokens on the host; the old one's is sampled at a position of the new one's prompt."""
    words = [[90, 90, 90]]
    old = worker.execute_model(make_step({0: 3}, new=[admit(0, SHORT, [1, 2], bad_words=words)]))
    chunk = worker.execute_model(make_step({0: 2}, finished=[0], new=[admit(0, LONG, range(1, 7), bad_words=words)]))
    for message in (old, chunk):
        message.result()
    first = sampled(run(worker, {0: 13}))
    assert [first[0], *decode(worker, [0], 3)[0]] == reference(LONG, 4)


def test_a_row_without_a_token_has_an_id_of_the_vocabulary(worker: Worker) -> None:
    """Its next step may be in flight, and its matcher takes the id."""
    output = run(worker, {0: 4}, new=[admit(0, [*SHORT, POISON], [1, 2], bad_words=[[90, 90]])])
    assert [error.row for error in output.row_errors] == [0]
    assert worker._runner is not None
    assert worker._runner.rows.token_ids[0, 4] == 0


def test_a_row_that_needs_its_tokens_waits_for_every_step_that_has_some(worker: Worker, reference: Reference) -> None:
    """Of the step between no row that samples needs them, so that it waits for none and adds to those that are unread.
    The second word that rows 0 and 1 would write is barred."""
    expected = {0: reference(SHORT, 2), 1: reference(LONG, 2)}
    penalized = SamplingParams(temperature=0, max_tokens=None, frequency_penalty=0.5)
    needs = [admit(0, SHORT, [1, 2], bad_words=[expected[0]]), admit(1, LONG, range(3, 9), bad_words=[expected[1]])]
    messages = [
        make_step({0: 3}, new=needs[:1]),
        make_step({1: 5, 2: 3}, new=[needs[1], admit(2, SHORT, [9, 10], params=penalized)]),
        make_step({0: 1, 1: 10}),
        make_step({1: 1}),
    ]
    launched = [worker.execute_model(message) for message in messages]
    first, between, second, last = [
        output.token_ids.tolist() for output in (one.result() for one in launched) if output
    ]
    assert (first, between) == (expected[0][:1], expected[0][:1])
    assert second[0] != expected[0][1]
    assert second[1] == expected[1][0]
    assert last[0] != expected[1][1]


def test_a_message_is_done_before_it_is_read(worker: Worker) -> None:
    """Asked twice: the first question may find out that a step which was never launched is not to be waited for."""
    message = worker.execute_model(make_step({0: 3}, new=[admit(0, SHORT, [1, 2])]))
    assert [message.done(), message.done()] == [True, True]


def test_a_step_without_rows_is_written_at_once(worker: Worker) -> None:
    """The writes of one launch have no order among them: the next message may admit another request to the row."""
    runner: Any = worker._runner
    state = runner.launcher._device_rows.state
    before = state.clone()
    worker.execute_model(make_step({}, new=[admit(0, SHORT, [1, 2])])).result()
    assert not torch.equal(state, before)


def test_a_rank_without_output_zeroes_its_pages_too(tiny_llama: tuple[str, Any], worker: Worker) -> None:
    silent = start(Worker(make_config(tiny_llama[0]), 0, None), rank=1)
    assert silent._runner is not None
    model: Any = silent._runner.paged.model
    model.embed_tokens = worker._runner.paged.model.embed_tokens  # type: ignore[union-attr, attr-defined]
    assert silent.execute_model(make_step({0: 4}, new=[admit(0, [*SHORT, POISON], [1, 2])])).result() is None
    assert all(torch.isfinite(cache).all() for cache in silent._runner.paged.kv_caches.values())
    silent.shutdown()
