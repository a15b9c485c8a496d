"""100,000 draws of every filter and adjustment against the exact probabilities, by a chi-squared test.

The seeds are fixed, so a test gives the same p-value every time. That it can tell is shown by a distribution that is
nearly the right one, which the same draws must refute.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adjusted_rows import Row, adjustments_of
from exact_sampling import CASES, LOGITS, VOCAB_SIZE, Case, exact_probabilities, p_value
from sampling_rows import inputs

from ringcore.model_executor.logit_adjustments import adjust_logits
from ringcore.model_executor.sampler import sample

DRAWS = 100_000
BATCH = 20_000  # what stays in the caches


def counts_of(case: Case) -> np.ndarray:
    """[VOCAB_SIZE]: how often each token was drawn."""
    adjustments = adjustments_of([case.row] * BATCH, VOCAB_SIZE) if case.row != Row() else None
    logits = torch.from_numpy(LOGITS).expand(BATCH, -1).contiguous()
    counts = np.zeros(VOCAB_SIZE, np.int64)
    for begin in range(0, DRAWS, BATCH):
        adjusted = logits if adjustments is None else adjust_logits(logits, adjustments)
        sampled = sample(adjusted, inputs(BATCH, seed=np.arange(begin, begin + BATCH), **case.columns))
        assert sampled.ok.all()
        counts += np.bincount(sampled.token_ids.numpy(), minlength=VOCAB_SIZE)
    return counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draws_have_the_exact_probabilities(case: Case) -> None:
    counts = counts_of(case)
    assert counts.sum() == DRAWS
    assert p_value(counts, case.probabilities) > 1e-4
    assert p_value(counts, case.wrong_probabilities) < 1e-4


def test_exact_probabilities_by_hand() -> None:
    """Of weights 4, 3, 2, 1 top_k=3 leaves 9, of which top_p=0.7 takes 4 and 3; squared they are 16, 9, 4 and 1."""
    logits = np.log([1.0, 4.0, 2.0, 3.0]).tolist()
    free = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert exact_probabilities(logits, Row(), **free) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    kept = exact_probabilities(logits, Row(), **(free | {"top_k": 3, "top_p": 0.7}))
    assert kept == pytest.approx([0, 4 / 7, 0, 3 / 7])
    cold = exact_probabilities(logits, Row(), **(free | {"temperature": 0.5, "min_p": 0.2}))
    assert cold == pytest.approx([0, 16 / 29, 4 / 29, 9 / 29])
    barred = exact_probabilities(logits, Row(allowed=frozenset({0, 3})), **free)
    assert barred == pytest.approx([0.25, 0, 0, 0.75])


def test_p_values_by_hand() -> None:
    """One degree of freedom: the tail of the normal distribution beyond the root of the statistic, on both sides. Two:
    exp(-statistic / 2)."""
    assert p_value(np.array([60, 40]), np.array([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)
    assert p_value(np.array([30, 30, 60]), np.array([1, 1, 1]) / 3) == pytest.approx(np.exp(-7.5))
    assert p_value(np.array([50, 50, 0]), np.array([0.5, 0.5, 0])) == pytest.approx(1)
    assert p_value(np.array([50, 50, 1]), np.array([0.5, 0.5, 0])) == 0
