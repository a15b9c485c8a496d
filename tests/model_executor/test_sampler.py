"""The sampler: its generator against published numbers, its filters by hand, its draws by their frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_rows import inputs

from ringcore.model_executor.sampler import philox_4x32_10, sample, token_logprobs, uniforms

DRAWS = 20_000


def logits_of(probabilities: list[float], n: int = 1) -> torch.Tensor:
    return torch.tensor(probabilities).log().expand(n, -1).contiguous()


def draws(probabilities: list[float], n: int = 2000, **columns: Any) -> list[int]:
    return sample(logits_of(probabilities, n), inputs(n, **columns)).token_ids.tolist()


def chi_squared_p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of counts against expected counts, by the Wilson-Hilferty normal approximation."""
    degrees = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: tuple, key: tuple, expected: tuple) -> None:
    """The known-answer vectors of the authors' library Random123 for philox4x32 with 10 rounds."""
    words = philox_4x32_10(tuple(torch.tensor([w]) for w in counter), tuple(torch.tensor([w]) for w in key))
    assert tuple(w.item() for w in words) == expected


def test_uniforms_are_columns_of_one_stream_and_inside_the_unit_interval() -> None:
    seed, position = np.array([7, 7, 2**62 + 7]), np.array([3, 4, 3])
    many = uniforms(seed, position, 4096)
    assert torch.equal(uniforms(seed[1:], position[1:], 10), many[1:, :10])
    assert ((many > 0) & (many < 1)).all()
    assert many.unique().numel() > 3 * 4096 - 10
    assert abs(many.mean().item() - 0.5) < 0.02


def test_greedy_takes_the_best_and_ignores_the_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    columns = inputs(2, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert sample(logits, columns).token_ids.tolist() == [1, 0]


def test_greedy_and_drawing_rows_mix() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    temperature = np.array([0, 1, 0, 0.5, 1, 0])
    mixed = sample(logits, inputs(6, temperature=temperature)).token_ids
    greedy = temperature == 0
    assert torch.equal(mixed[greedy], logits[greedy].argmax(-1))
    for i in np.flatnonzero(~greedy):
        alone = sample(logits[i : i + 1], inputs(1, temperature=temperature[i], seed=i))
        assert mixed[i] == alone.token_ids[0]


@pytest.mark.parametrize("vocab_size", [3, 50, 1000, 49152])
def test_a_seeded_row_draws_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    n = 12
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1))
    columns = {"top_k": np.arange(n) % 3 * 20, "top_p": np.where(np.arange(n) % 2, 0.9, 1.0), "position": np.arange(n)}
    together = sample(logits, inputs(n, **columns)).token_ids
    for i in range(n):
        mine = {k: v[i] for k, v in columns.items()}
        assert sample(logits[i : i + 1], inputs(1, seed=i, **mine)).token_ids[0] == together[i]


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(400, 1000)
    by_seed = sample(logits, inputs(400)).token_ids
    by_position = sample(logits, inputs(400, seed=0, position=np.arange(400))).token_ids
    assert by_seed.unique().numel() > 250
    assert by_position.unique().numel() > 250
    assert not torch.equal(by_seed, by_position)


# Kept tokens by hand; each test draws often enough to see all of them and would see any other.


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draws([0.1, 0.4, 0.2, 0.3], top_k=1)) == {1}
    assert set(draws([0.1, 0.4, 0.2, 0.3], top_k=2)) == {1, 3}
    assert set(draws([0.1, 0.4, 0.2, 0.3], top_k=4)) == {0, 1, 2, 3}
    assert set(draws([0.1, 0.4, 0.2, 0.3], top_k=9)) == {0, 1, 2, 3}


def test_top_k_keeps_ties() -> None:
    assert set(draws([0.4, 0.2, 0.2, 0.2], top_k=2)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(draws([0.5, 0.3, 0.2], top_p=0.4)) == {0}
    assert set(draws([0.5, 0.3, 0.2], top_p=0.51)) == {0, 1}
    assert set(draws([0.5, 0.3, 0.2], top_p=0.79)) == {0, 1}
    assert set(draws([0.5, 0.3, 0.2], top_p=0.81)) == {0, 1, 2}
    assert set(draws([0.2, 0.3, 0.5], top_p=1e-6)) == {2}


def test_top_p_counts_in_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 top_k=2 leaves 4/7 and 3/7: 0.55 is reached by the first alone (by two without top_k)."""
    assert set(draws([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55)) == {0}
    assert set(draws([0.4, 0.3, 0.2, 0.1], top_p=0.55)) == {0, 1}


def test_min_p_keeps_what_is_near_the_best() -> None:
    assert set(draws([0.5, 0.3, 0.2], min_p=0.5)) == {0, 1}
    assert set(draws([0.5, 0.3, 0.2], min_p=0.7)) == {0}
    assert set(draws([0.5, 0.3, 0.2], min_p=0.39)) == {0, 1, 2}
    assert set(draws([0.5, 0.5, 0.0], min_p=1.0)) == {0, 1}


def test_the_temperature_comes_before_the_filters() -> None:
    """At temperature 0.5 the probabilities 0.5, 0.3, 0.2 become 25/38, 9/38, 4/38."""
    assert set(draws([0.5, 0.3, 0.2], temperature=0.5, top_p=0.65)) == {0}
    assert set(draws([0.5, 0.3, 0.2], temperature=0.5, min_p=0.2)) == {0, 1}


def test_top_p_beyond_the_sorted_head() -> None:
    """300 tokens share 3/4 and 300 others 1/4: 0.7 is reached by the 280th of the better ones, which all tie."""
    probabilities = [3 / 1200] * 300 + [1 / 1200] * 300
    assert set(draws(probabilities, n=4000, top_p=0.7)) == set(range(300))
    assert max(draws(probabilities, top_p=0.9)) >= 300


def test_rows_filter_by_their_own_parameters() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    n = 4000
    kind = np.arange(n) % 4
    tokens = np.array(
        draws(
            p,
            n=n,
            top_k=np.choose(kind, [0, 1, 0, 3]),
            top_p=np.choose(kind, [1, 1, 0.6, 0.65]),
            min_p=np.choose(kind, [0, 0, 0, 0.7]),
        )
    )
    assert [set(tokens[kind == i].tolist()) for i in range(4)] == [{0, 1, 2, 3}, {0}, {0, 1}, {0, 1}]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({}, 60), ({"top_k": 7}, 7), ({"top_p": 0.5}, 18), ({"min_p": 0.5}, 31), ({"top_k": 20, "top_p": 0.6}, 12)],
)
def test_draws_have_the_exact_probabilities(filters: dict[str, float], kept: int) -> None:
    """60 tokens of weights 1 to 60, shuffled. top_p=0.5 of 1830 is reached by the best 18 (927; 17 make 884), 0.6 of
    the 1010 of the best 20 by 12 (654; 11 make 605)."""
    weights = np.random.default_rng(0).permutation(np.arange(1, 61)).astype(np.float64)
    tokens = draws((weights / weights.sum()).tolist(), n=DRAWS, **filters)
    exact = np.where(weights > 60 - kept, weights, 0)
    counts = np.bincount(tokens, minlength=60)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] / exact.sum() * DRAWS
    assert chi_squared_p_value(counts[exact > 0], expected) > 1e-3


def test_the_two_levels_of_the_draw_are_independent() -> None:
    """A vocabulary of many groups; the place within the group must not follow from which group was drawn."""
    logits = torch.zeros(DRAWS, 256)
    tokens = sample(logits, inputs(DRAWS)).token_ids.numpy()
    counts = np.bincount(tokens, minlength=256)
    assert chi_squared_p_value(counts, np.full(256, DRAWS / 256)) > 1e-3


def test_bars_hold_for_greedy_and_drawing_rows_and_leave_the_logits() -> None:
    logits = logits_of([0.7, 0.1, 0.2], 2000)
    before = logits.clone()
    masked_tokens = {"masked_rows": [*range(2000), 0], "masked_ids": [0] * 2000 + [2]}
    drawn = sample(logits, inputs(2000, **masked_tokens)).token_ids
    assert set(drawn.tolist()) == {1, 2}
    assert drawn[0] == 1
    assert set(sample(logits, inputs(2000, temperature=0.0, **masked_tokens)).token_ids[1:].tolist()) == {2}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_flagged(bad: float, temperature: float) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    clean = sample(logits, inputs(5, temperature=temperature))
    assert clean.ok.all()
    logits[3, 17] = bad
    sampled = sample(logits, inputs(5, temperature=temperature))
    assert sampled.ok.tolist() == [True, True, True, False, True]
    assert sampled.token_ids[sampled.ok].tolist() == clean.token_ids[sampled.ok].tolist()
    assert 0 <= sampled.token_ids[3] < 40


def test_logprobs_by_hand() -> None:
    logits = logits_of([0.1, 0.4, 0.2, 0.3], 3) + 7
    found = token_logprobs(logits, torch.tensor([2, 1, 0]), np.array([2, -1, 0]))
    assert found is not None
    first, second, third = found
    assert second is None
    assert first is not None
    assert third is not None
    assert (first.token_ids, first.ranks) == ([2, 1, 3], [3, 1, 2])
    assert first.logprobs == pytest.approx([math.log(p) for p in (0.2, 0.4, 0.3)], abs=1e-5)
    assert (third.token_ids, third.ranks) == ([0], [4])
    assert third.logprobs == pytest.approx([math.log(0.1)], abs=1e-5)


def test_tied_tokens_share_a_rank_and_nobody_asking_costs_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    found = token_logprobs(logits, torch.tensor([0]), np.array([4]))
    assert found is not None
    assert found[0] is not None
    assert found[0].ranks == [3, 1, 1, 3, 4]
    assert token_logprobs(logits, torch.tensor([0]), np.array([-1])) is None
