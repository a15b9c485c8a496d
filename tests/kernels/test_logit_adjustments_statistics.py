"""Draws of the kernels against the exact probabilities, by a chi-squared test: on a GPU 100,000 of each case.

Triton's interpreter makes some dozens in a second, which tell a distribution apart only from a very different one. That
the kernels draw the CPU's tokens is tested elsewhere, and those are held to the exact probabilities 100,000 at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adjusted_rows import Row, adjustments_of
from exact_sampling import ASKS_FOR_EVERYTHING, CASES, LOGITS, VOCAB_SIZE, Case, p_value
from sampling_rows import inputs

from ringcore.kernels.logits.logit_adjustments import adjust_logits
from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens

ON_GPU = torch.cuda.is_available()
in_the_interpreter = pytest.mark.skipif(ON_GPU, reason="the larger test is done")
NARROW = [
    Case("top_k", top_k=7),
    Case("top_p", top_p=0.2),
    Case("min_p", min_p=0.9),
    Case("allowed tokens", Row(allowed=frozenset(range(4, VOCAB_SIZE, 5)))),
    Case("everything", ASKS_FOR_EVERYTHING, temperature=0.8, top_k=20, top_p=0.5, min_p=0.4),
]


def counts_of(case: Case, draws: int, device: torch.device) -> np.ndarray:
    """[VOCAB_SIZE]: how often each token was drawn."""
    logits = torch.from_numpy(LOGITS)[None].to(device)
    adjusted = adjust_logits(logits, adjustments_of([case.row], VOCAB_SIZE, device)).expand(draws, -1)
    placed = DeviceSamplingInputs.from_host(inputs(draws, **case.columns), device)
    token_ids, ok = sample_tokens(adjusted, placed)
    assert ok.all()
    return np.bincount(token_ids.cpu().numpy(), minlength=VOCAB_SIZE)


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter would need an hour for one of them")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draws_have_the_exact_probabilities(case: Case, device: torch.device) -> None:
    counts = counts_of(case, 100_000, device)
    assert p_value(counts, case.probabilities) > 1e-4
    assert p_value(counts, case.wrong_probabilities) < 1e-4


@in_the_interpreter
def test_a_hundred_draws_are_not_far_from_the_exact_probabilities(device: torch.device) -> None:
    """Tokens of a quarter of the probability each are counted together; draws without the temperature would be seen."""
    case = Case("cold", temperature=0.25, wrong={"temperature": 1.0})
    exact = case.probabilities
    quarter = np.minimum(exact[ranked := np.argsort(-exact)].cumsum() * 4, 3).astype(int)

    def by_quarter(amounts: np.ndarray) -> np.ndarray:
        return np.bincount(quarter, weights=amounts[ranked])

    counts = by_quarter(counts_of(case, 100, device))
    assert p_value(counts, by_quarter(exact)) > 1e-4
    assert p_value(counts, by_quarter(case.wrong_probabilities)) < 1e-4


@in_the_interpreter
@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_few_draws_keep_to_what_is_left(case: Case, device: torch.device) -> None:
    """Of a row as it was given, so many draws in that narrow a part would be an accident."""
    draws = 8
    is_left = case.probabilities > 0
    assert CASES[0].probabilities[is_left].sum() ** draws < 1e-4
    assert counts_of(case, draws, device)[~is_left].sum() == 0
