"""A worker in this process on a tiny random Llama, driven by hand-made steps; greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from device_runner import rows_on_device
from step_driver import GREEDY, admit, break_embedding, decode, execute, make_config, make_step, run, sampled, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import SchedulerOutput
from ringcore.worker.worker import Worker

Reference = Callable[[Sequence[int], int], list[int]]

LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]
SHORT = [11, 60, 23]


@pytest.fixture(params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    """The CPU's runner, and the GPU's with its kernels in Triton's interpreter."""
    if request.param == "gpu":
        rows_on_device(request.getfixturevalue("monkeypatch"), plans_on_device=True)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    yield worker
    worker.shutdown()


def test_a_whole_prompt_and_its_decoding(worker: Worker, reference: Reference) -> None:
    first = sampled(run(worker, {2: 15}, new=[admit(2, LONG, range(1, 11))]))
    written = [first[2], *decode(worker, [2], 20)[2]]
    assert written == reference(LONG, 21)


@pytest.mark.parametrize("chunks", [[5, 7, 3], [1] * 15, [14, 1], [4, 4, 4, 3]])
def test_a_chunked_prompt(worker: Worker, reference: Reference, chunks: list[int]) -> None:
    outputs = [run(worker, {0: chunks[0]}, new=[admit(0, LONG, [9, 3, 7, 5, 1, 30])])]
    outputs += [run(worker, {0: n}) for n in chunks[1:]]
    assert [sampled(o) for o in outputs[:-1]] == [{}] * (len(chunks) - 1)
    assert [sampled(outputs[-1])[0], *decode(worker, [0], 8)[0]] == reference(LONG, 9)


def test_a_prefix_in_other_requests_blocks_while_they_decode(worker: Worker, reference: Reference) -> None:
    other = [*LONG[:8], 50, 51]
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, [9, 3, 7, 5, 1, 30])]))
    mixed = sampled(run(worker, {0: 1, 4: 2}, new=[admit(4, other, [9, 3, 20, 21], computed=8)]))
    rest = decode(worker, [4, 0], 5)
    assert [mixed[4], *rest[4]] == reference(other, 6)
    assert [first[0], mixed[0], *rest[0]] == reference(LONG, 7)


def test_rows_and_blocks_are_reused(worker: Worker, reference: Reference) -> None:
    run(worker, {0: 15}, new=[admit(0, LONG, [9, 3, 7, 5, 1])])
    decode(worker, [0], 3)
    first = sampled(run(worker, {0: 3}, finished=[0], new=[admit(0, SHORT, [7, 9])]))
    assert [first[0], *decode(worker, [0], 4)[0]] == reference(SHORT, 5)


def test_blocks_arrive_as_they_are_needed(worker: Worker, reference: Reference) -> None:
    written = [sampled(run(worker, {1: 3}, new=[admit(1, SHORT, [6])]))[1]]
    for position in range(3, 13):
        blocks = [(1, 30 - position)] if position % 4 == 0 else []
        written.append(sampled(run(worker, {1: 1}, blocks=blocks))[1])
    assert written == reference(SHORT, 11)


def test_a_resumed_request_goes_on_where_it_was(worker: Worker, reference: Reference) -> None:
    expected = reference(SHORT, 8)
    known = SHORT + expected[:4]
    first = sampled(run(worker, {3: 7}, new=[admit(3, known, [4, 2, 8], num_prompt_tokens=3)]))
    assert [first[3], *decode(worker, [3], 3)[3]] == expected[4:]


def test_a_step_without_rows_still_takes_in_the_delta(worker: Worker, reference: Reference) -> None:
    run(worker, {0: 3}, new=[admit(0, SHORT, [7, 9])])
    output = run(worker, {}, finished=[0], number=8)
    assert (output.step, sampled(output)) == (8, {})
    assert sampled(run(worker, {0: 3}, new=[admit(0, SHORT, [1, 2])]))[0] == reference(SHORT, 1)[0]


def test_reset_rows_forgets_them(worker: Worker, reference: Reference) -> None:
    run(worker, {0: 3, 1: 15}, new=[admit(0, SHORT, [7, 9]), admit(1, LONG, [1, 2, 3, 4])])
    worker.reset_rows()
    assert sampled(run(worker, {1: 3}, new=[admit(1, SHORT, [1, 2])]))[1] == reference(SHORT, 1)[0]


def test_a_seeded_row_draws_the_same_alone_and_among_others(worker: Worker) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=1234, max_tokens=None)
    first = sampled(run(worker, {0: 3}, new=[admit(0, SHORT, [1, 2, 3, 4], params=params)]))
    alone = [first[0], *decode(worker, [0], 8)[0]]
    noise = [admit(row, LONG[:row], [5 + 4 * row, 6 + 4 * row, 7 + 4 * row], params=params) for row in (1, 2, 3)]
    run(worker, {1: 1, 2: 2, 3: 3}, finished=[0], new=noise)
    first = sampled(run(worker, {1: 1, 5: 3, 3: 1}, new=[admit(5, SHORT, [30, 1, 2], params=params)]))
    among = [first[5], *decode(worker, [3, 5, 1], 8)[5]]
    assert among == alone
    assert len(set(alone)) > 2, "drawn, not repeated"


def test_logprobs_are_of_the_raw_distribution(worker: Worker, tiny_llama: tuple[str, Any]) -> None:
    params = SamplingParams(temperature=0.3, seed=3, logprobs=4)
    new = [admit(0, SHORT, [1, 2], params=params), admit(1, LONG, [3, 4, 5, 6])]
    output = run(worker, {0: 3, 1: 15}, new=new)
    assert output.logprobs is not None
    assert output.logprobs[1] is None
    found = output.logprobs[0]
    assert found is not None
    with torch.inference_mode():
        logprobs = tiny_llama[1](torch.tensor([SHORT])).logits[0, -1].log_softmax(-1)
    best = logprobs.topk(4)
    token = sampled(output)[0]
    assert found.token_ids == [token, *best.indices.tolist()]
    assert found.logprobs == pytest.approx([logprobs[token].item(), *best.values.tolist()], abs=1e-4)
    assert found.ranks == [int((logprobs > logprobs[token]).sum()) + 1, 1, 2, 3, 4]


def test_logprobs_are_in_the_messages_order(worker: Worker) -> None:
    """A prompt before two rows that decode, and so come first in the batch."""
    params = SamplingParams(temperature=0, max_tokens=None, logprobs=0)
    prompts = LONG, SHORT, LONG[7:]
    new = [admit(row, prompts[row], range(6 * row + 1, 6 * row + 7), params=params) for row in range(3)]
    run(worker, {0: 15, 1: 3}, new=new[:2])
    output = run(worker, {2: 8, 0: 1, 1: 1}, new=new[2:])
    assert output.logprobs is not None
    assert [found and found.token_ids for found in output.logprobs] == [[token] for token in output.token_ids.tolist()]
    assert len(set(output.token_ids.tolist())) == 3, "an order can be told"


def test_min_tokens_bars_the_stop_tokens(worker: Worker, reference: Reference) -> None:
    expected = reference(SHORT, 2)
    params = SamplingParams(temperature=0, min_tokens=1, max_tokens=9)
    new = [admit(0, SHORT, [1, 2], params=params, stop_token_ids=[expected[0]])]
    assert sampled(run(worker, {0: 3}, new=new))[0] != expected[0]
    known = [*SHORT, expected[0]]
    new = [admit(1, known, [3, 4], params=params, num_prompt_tokens=3, stop_token_ids=[expected[1]])]
    assert sampled(run(worker, {1: 4}, new=new))[1] == expected[1], "min_tokens is reached"


def test_a_prompt_that_is_wholly_cached_computes_its_last_token(worker: Worker, reference: Reference) -> None:
    """12 tokens in 3 blocks: the row that computed them and the one that found them go on side by side."""
    prompt = LONG[:12]
    first = sampled(run(worker, {0: 12}, new=[admit(0, prompt, [9, 3, 7, 20, 21])]))
    assert worker._runner is not None
    shared = [cache[:, :, [9, 3, 7]].clone() for cache in worker._runner.paged.kv_caches.values()]
    new = [admit(1, prompt, [9, 3, 7, 22, 23], computed=11, cached=12)]
    both = sampled(run(worker, {0: 1, 1: 1}, new=new))
    rest = decode(worker, [1, 0], 6)
    assert [both[1], *rest[1]] == reference(prompt, 7)
    assert [first[0], both[0], *rest[0]] == reference(prompt, 8)
    for cache, old in zip(worker._runner.paged.kv_caches.values(), shared, strict=True):
        assert torch.equal(cache[:, :, [9, 3, 7]], old)


def test_a_backend_that_cannot_plan_on_the_device(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: tuple[str, Any], reference: Reference
) -> None:
    """Then every step is put together on the host; what rows sampled comes from the device all the same."""
    rows_on_device(monkeypatch, plans_on_device=False)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, [9, 3, 7, 5, 1, 30])]))
    other = sampled(run(worker, {4: 2, 0: 1}, new=[admit(4, SHORT, [20, 21, 22])]))
    both = sampled(run(worker, {4: 1, 0: 1}))
    rest = decode(worker, [4, 0], 4)
    worker.shutdown()
    assert [both[4], *rest[4]] == reference(SHORT, 5)
    assert [first[0], other[0], both[0], *rest[0]] == reference(LONG, 7)


# Several steps in one message, and steps that repeat the one before.


def test_several_steps_are_as_many_single_ones(worker: Worker) -> None:
    """Drawn with seeds, and their log-probabilities: row after row, step after step."""
    rows = {
        2: SamplingParams(temperature=0.9, seed=7, logprobs=1, max_tokens=None),
        0: SamplingParams(temperature=1.0, top_k=20, seed=8, max_tokens=None),
        5: SamplingParams(temperature=0.8, top_p=0.9, seed=9, logprobs=0, max_tokens=None),
    }

    def begin() -> None:
        new = [admit(row, LONG[: row + 3], range(6 * row + 1, 6 * row + 7), params=p) for row, p in rows.items()]
        run(worker, {row: row + 3 for row in rows}, new=new)

    begin()
    singles = [run(worker, dict.fromkeys(rows, 1)) for _ in range(4)]
    worker.reset_rows()
    begin()
    together = run(worker, dict.fromkeys(rows, 1), num_steps=4)
    assert together.rows is not None
    assert together.rows.tolist() == [2, 0, 5]
    assert together.token_ids.reshape(3, 4).T.tolist() == [single.token_ids.tolist() for single in singles]
    assert together.logprobs is not None
    for i in range(3):
        for step, single in enumerate(singles):
            found, expected = together.logprobs[4 * i + step], (single.logprobs or [])[i]
            assert (found is None) == (expected is None) == (i == 1)
            if found is not None and expected is not None:
                assert (found.token_ids, found.ranks) == (expected.token_ids, expected.ranks)
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    after = sampled(run(worker, dict.fromkeys(rows, 1)))
    assert list(after) == [2, 0, 5], "the rows go on where the message ended"


def test_the_first_of_several_steps_may_compute_a_prompt(worker: Worker, reference: Reference) -> None:
    """The counts are the first step's; each later one computes what the one before it sampled."""
    new = [admit(0, LONG, range(1, 7)), admit(1, SHORT, range(7, 10))]
    output = run(worker, {0: 15, 1: 3}, new=new, num_steps=4)
    assert output.token_ids.reshape(2, 4).tolist() == [reference(LONG, 4), reference(SHORT, 4)]


def test_more_steps_in_one_message_than_the_ring_has_slots(worker: Worker, reference: Reference) -> None:
    """The step after them is launched before the first of them is read by whoever waits for the message."""
    expected = reference(SHORT, 72)
    assert sampled(run(worker, {0: 3}, new=[admit(0, SHORT, range(1, 21))]))[0] == expected[0]
    message = worker.execute_model(make_step({0: 1}, num_steps=70))
    after = worker.execute_model(make_step({0: 1}))
    outputs = [message.result(), after.result()]
    assert [output.token_ids.tolist() for output in outputs if output] == [expected[1:71], expected[71:]]


def test_a_worker_without_drafts_gains_one_token_where_it_may_gain_more(worker: Worker, reference: Reference) -> None:
    written = [sampled(run(worker, {0: 3}, new=[admit(0, SHORT, [7, 9, 2])]))[0]]
    for number in range(1, 5):
        step = msgspec.structs.replace(make_step({0: 1}, number=number), max_gained=int_array([4]))
        output = execute(worker, step)
        assert output is not None
        assert output.num_gained is None
        written += output.token_ids.tolist()
    assert written == reference(SHORT, 5)


def test_rows_that_are_not_named_are_those_of_the_step_before(worker: Worker, reference: Reference) -> None:
    """And what they sampled names none, where all of them did."""
    new = [admit(4, LONG, range(1, 8)), admit(1, SHORT, range(8, 12))]
    first = execute(worker, make_step({4: 15, 1: 3}, new=new))
    outputs = [first, *(execute(worker, again(number)) for number in range(1, 6))]
    assert [output.rows for output in outputs if output] == [None] * 6
    tokens = [output.token_ids.tolist() for output in outputs if output]
    assert [both[0] for both in tokens] == reference(LONG, 6)
    assert [both[1] for both in tokens] == reference(SHORT, 6)


def test_a_step_in_which_not_all_sample_names_those_that_did(worker: Worker) -> None:
    output = execute(worker, make_step({0: 5, 1: 3}, new=[admit(0, LONG, [1, 2, 3, 4]), admit(1, SHORT, [5])]))
    assert output is not None
    assert output.rows is not None
    assert output.rows.tolist() == [1]


def again(number: int) -> SchedulerOutput:
    return SchedulerOutput(number, 1, int_array(), [], [], None, None, 2)


# A request whose numbers overflow.


@pytest.fixture
def poisoned(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> int:
    """A token whose embedding is NaN."""
    token = 96
    break_embedding(monkeypatch, worker, token)
    return token


@pytest.mark.parametrize("scheduled", [{0: 5, 1: 15}, {1: 3, 0: 5}])
def test_a_row_that_is_not_finite_ends_alone(
    worker: Worker, reference: Reference, poisoned: int, scheduled: dict[int, int]
) -> None:
    bad, good = [*SHORT, poisoned, 5], LONG[: scheduled[1]]
    output = run(worker, scheduled, new=[admit(0, bad, [1, 2, 20]), admit(1, good, range(3, 11))])
    assert [error.row for error in output.row_errors] == [0]
    assert "hidden states are not finite" in output.row_errors[0].message
    assert worker._runner is not None
    for cache in worker._runner.paged.kv_caches.values():
        assert torch.isfinite(cache).all()
        assert not cache[:, :, [1, 2]].any()
    assert list(sampled(output)) == [1]
    # The step after may be under way already when the error arrives: it must run, and the neighbour must go on.
    written = [sampled(output)[1], *decode(worker, [0, 1], 6)[1]]
    assert written == reference(good, 7)


def test_a_row_that_breaks_amid_several_steps_is_told_once(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token that row 0 writes is one that breaks it; it has two more steps to go."""
    fatal = reference(SHORT, 2)[1]
    written = reference(LONG, 5)
    assert fatal not in written
    assert worker._runner is not None
    new = [admit(0, SHORT, [1, 2, 3]), admit(1, LONG, range(4, 10))]
    first = sampled(run(worker, {0: 3, 1: 15}, new=new))
    break_embedding(monkeypatch, worker, fatal)
    output = run(worker, {0: 1, 1: 1}, num_steps=4)
    assert [error.row for error in output.row_errors] == [0]
    assert output.rows is not None
    assert output.rows.tolist() == [1]
    assert [first[1], *output.token_ids.tolist()] == written
    assert all(torch.isfinite(cache).all() for cache in worker._runner.paged.kv_caches.values())


def test_a_chunk_that_samples_nothing_is_told_too_and_leaves_nothing_in_its_blocks(
    worker: Worker, reference: Reference, poisoned: int
) -> None:
    output = run(worker, {0: 12}, new=[admit(0, [poisoned] * 14, [1, 2, 3, 4])])
    assert [error.row for error in output.row_errors] == [0]
    assert sampled(output) == {}
    # Two requests of like length share a decode batch, whose padding is in the blocks that held the bad numbers.
    new = [admit(1, SHORT, [2, 3, 4]), admit(2, LONG[:5], [1, 5, 6])]
    first = sampled(run(worker, {1: 3, 2: 5}, finished=[0], new=new))
    rest = decode(worker, [1, 2], 6)
    assert [first[1], *rest[1]] == reference(SHORT, 7)
    assert [first[2], *rest[2]] == reference(LONG[:5], 7)


def test_logprobs_stay_with_their_rows_beside_an_error(worker: Worker, poisoned: int) -> None:
    asking = SamplingParams(temperature=0, logprobs=0)
    new = [admit(0, [poisoned], [1], params=asking), admit(1, SHORT, [2], params=asking), admit(2, SHORT, [3])]
    output = run(worker, {0: 1, 1: 3, 2: 3}, new=new)
    assert output.rows.tolist() == [1, 2]
    assert output.logprobs is not None
    assert output.logprobs[0] is not None
    assert output.logprobs[0].token_ids == [sampled(output)[1]]
    assert output.logprobs[1] is None


def test_only_the_output_rank_answers(tiny_llama: tuple[str, Any], reference: Reference) -> None:
    """Rank 1 of the same model: executes, samples into its rows, and has nothing to say."""
    silent = start(Worker(make_config(tiny_llama[0]), 0, None), rank=1)
    assert execute(silent, make_step({0: 3}, new=[admit(0, SHORT, [1, 2], params=GREEDY)])) is None
    assert execute(silent, make_step({})) is None
    assert silent._runner is not None
    assert silent._runner.rows.token_ids[0, 3] == reference(SHORT, 1)[0]
