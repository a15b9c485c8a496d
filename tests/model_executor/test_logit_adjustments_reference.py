"""Biases, penalties and masks against a computation by hand, a token at a time, and their place before the draw."""

from __future__ import annotations

import itertools
import math

import adjusted_by_eye as eye
import numpy as np
import pytest
import torch
from adjusted_rows import Row, adjustments_of, assert_same, by_hand, random_logits, random_rows
from exact_sampling import p_value
from test_sampler import inputs

from ringcore.model_executor.logit_adjustments import IN_PROMPT, adjust_logits, count_tokens, reset_counts
from ringcore.model_executor.sampler import sample

pytestmark = pytest.mark.sampled

PARTS = [
    dict(zip(("bias", "penalties", "masks"), on, strict=True)) for on in itertools.product((True, False), repeat=3)
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf - inf of numpy's scalars
@pytest.mark.parametrize("vocab_size", [1, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "+".join(name for name in parts if parts[name]) or "nothing")
def test_rows_as_by_hand(vocab_size: int, parts: dict[str, bool]) -> None:
    rows, logits = random_rows(12, vocab_size, seed=vocab_size), random_logits(12, vocab_size, seed=vocab_size)
    expected = torch.from_numpy(
        np.array([by_hand(x, row, **parts) for x, row in zip(logits.tolist(), rows, strict=True)], np.float32)
    )
    before = logits.clone()
    found = adjust_logits(logits, adjustments_of(rows, vocab_size), **parts)
    assert_same(found, expected)
    assert found.data_ptr() != logits.data_ptr()
    assert_same(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_widened_first(dtype: torch.dtype) -> None:
    rows, logits = random_rows(10, 70, seed=1), random_logits(10, 70, seed=1).to(dtype)
    adjustments = adjustments_of(rows, 70)
    assert_same(adjust_logits(logits, adjustments), adjust_logits(logits.float(), adjustments))


def test_in_place_and_in_another_tensor() -> None:
    rows, logits = random_rows(10, 70, seed=2), random_logits(10, 70, seed=2)
    adjustments = adjustments_of(rows, 70)
    expected = adjust_logits(logits, adjustments)
    wide = torch.full((10, 100), 5.0)
    out = wide[:, 10:80]
    assert adjust_logits(logits, adjustments, out=out) is out
    assert_same(out, expected)
    assert (wide[:, :10] == 5).all()
    assert (wide[:, 80:] == 5).all()
    assert adjust_logits(logits, adjustments, out=logits) is logits
    assert_same(logits, expected)


def test_the_parts_may_be_done_in_two_calls() -> None:
    """As where custom processors come between them."""
    rows, logits = random_rows(10, 70, seed=3), random_logits(10, 70, seed=3)
    adjustments = adjustments_of(rows, 70)
    between = adjust_logits(logits, adjustments, masks=False)
    assert_same(
        adjust_logits(between, adjustments, out=between, bias=False, penalties=False),
        adjust_logits(logits, adjustments),
    )


def test_more_rows_of_adjustments_than_of_logits() -> None:
    rows, logits = random_rows(10, 70, seed=4), random_logits(10, 70, seed=4)
    adjustments = adjustments_of(rows, 70)
    assert_same(adjust_logits(logits[:4], adjustments), adjust_logits(logits, adjustments)[:4])
    assert adjust_logits(logits[:0], adjustments).shape == (0, 70)


def test_a_token_of_the_prompt_alone_is_repeated_but_was_not_generated() -> None:
    """Token 0 in the prompt, 1 generated, 2 both, 3 neither."""
    row = Row(prompt=[0, 0, 2], output=[1, 2, 1], repetition=2.0, frequency=0.25, presence=0.5)
    found = adjust_logits(torch.tensor([[4.0, 4.0, 4.0, 4.0]]), adjustments_of([row], 4))
    assert found.tolist() == [[2.0, 2 - 2 * 0.25 - 0.5, 2 - 0.25 - 0.5, 4.0]]
    found = adjust_logits(torch.tensor([[-4.0, 0.0, -0.0, -4.0]]), adjustments_of([row], 4))
    assert found.tolist() == [[-8.0, -2 * 0.25 - 0.5, -0.25 - 0.5, -4.0]]


def test_a_broken_row_is_found_though_its_broken_token_is_barred() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = math.nan
    rows = [Row(allowed=frozenset({3}), bias={7: 1.0}), Row(allowed=frozenset({3}), bias={7: 1.0}), Row()]
    sampled = sample(adjust_logits(logits, adjustments_of(rows, 40)), inputs(3))
    assert sampled.ok.tolist() == [True, False, True]


def test_a_row_whose_every_token_is_barred_is_not_ok() -> None:
    rows = [Row(allowed=frozenset()), Row(allowed=frozenset({39}))]
    for temperature in (0.0, 1.0):
        sampled = sample(
            adjust_logits(torch.zeros(2, 40), adjustments_of(rows, 40)), inputs(2, temperature=temperature)
        )
        assert sampled.ok.tolist() == [False, True]
        assert sampled.token_ids[1] == 39


# The order of operations, by eye.


def test_each_part_by_eye() -> None:
    adjustments = adjustments_of([eye.ROW], 8)
    steps = [
        ({"penalties": False, "masks": False}, eye.BIASED),
        ({"masks": False}, eye.PENALIZED),
        ({}, eye.ADJUSTED),
    ]
    for parts, weights in steps:
        found = adjust_logits(eye.logits(), adjustments, **parts).exp()[0].tolist()
        assert found == pytest.approx(weights, rel=1e-5), parts


@pytest.mark.parametrize(("filters", "weights"), eye.STAGES, ids=str)
def test_draws_by_eye(filters: dict[str, float], weights: list[float]) -> None:
    n = 4000
    adjusted = adjust_logits(eye.logits(n), adjustments_of([eye.ROW] * n, 8))
    counts = np.bincount(sample(adjusted, inputs(n, **filters)).token_ids, minlength=8)
    assert set(np.flatnonzero(np.array(weights) >= 0.5)) == set(np.flatnonzero(counts)) - {2}
    assert p_value(counts, np.array(weights) / sum(weights)) > 1e-4


def test_raw_log_probabilities_are_not_those_of_the_draw() -> None:
    """Nothing is left of the raw logits where they are adjusted in place; elsewhere they stay."""
    raw = eye.logits()
    adjust_logits(raw, adjustments_of([eye.ROW], 8))
    assert raw.exp()[0].tolist() == pytest.approx(eye.RAW, rel=1e-5)


# Counts.


def test_counts_are_made_from_a_rows_own_tokens() -> None:
    counts = torch.full((3, 10), 77, dtype=torch.int32)
    reset_counts(counts, 1, np.array([3, 3, 9, 0], np.int32), np.array([9, 4, 9, 9], np.int32))
    assert counts[1].tolist() == [IN_PROMPT, 0, 0, IN_PROMPT, 1, 0, 0, 0, 0, IN_PROMPT + 3]
    assert (counts[[0, 2]] == 77).all()
    nothing = np.array([], np.int32)
    reset_counts(counts, 1, nothing, np.array([2], np.int32))
    assert counts[1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    reset_counts(counts, 1, np.array([5], np.int32), nothing)
    assert counts[1].tolist() == [0, 0, 0, 0, 0, IN_PROMPT, 0, 0, 0, 0]
    reset_counts(counts, 1, nothing, nothing)
    assert not counts[1].any()


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_token_outside_the_vocabulary_is_never_counted(bad: int) -> None:
    counts = torch.zeros(1, 10, dtype=torch.int32)
    with pytest.raises(AssertionError, match=str(bad)):
        reset_counts(counts, 0, np.array([1, bad], np.int32), np.array([2], np.int32))


def test_tokens_are_counted_in_the_slots_of_their_rows() -> None:
    """A row without a slot counts nowhere, not in the last slot either."""
    counts = torch.zeros(4, 10, dtype=torch.int32)
    counts[2, 5] = IN_PROMPT + 4
    count_tokens(counts, torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([5, 6, 7]))
    count_tokens(counts, torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([5, 6, 8]))
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[2, 5], expected[0, 7], expected[0, 8] = IN_PROMPT + 6, 1, 1
    assert torch.equal(counts, expected)


def test_counting_step_by_step_is_counting_at_once() -> None:
    """What a row has seen is the same, whether it went on or was built anew after a preemption."""
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(0, 50, (3, 12), np.int32), rng.integers(0, 50, (3, 30), np.int32)
    step_by_step, at_once = torch.zeros(3, 50, dtype=torch.int32), torch.zeros(3, 50, dtype=torch.int32)
    slots = torch.tensor([1, 2, 0], dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        reset_counts(step_by_step, slot, prompts[row], outputs[row, :0])
        reset_counts(at_once, slot, prompts[row], outputs[row])
    for tokens in outputs.T:
        count_tokens(step_by_step, slots, torch.from_numpy(tokens.astype(np.int64)))
    assert torch.equal(step_by_step, at_once)
