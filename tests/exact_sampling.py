"""The exact probabilities of sampled tokens, in float64 and plain Python, and how far counts are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from adjusted_rows import Row, by_hand

VOCAB_SIZE = 60
# Of weights 1 to 60, shuffled, over 20: logits of both signs, no two alike.
LOGITS = np.log(np.random.default_rng(0).permutation(np.arange(1, VOCAB_SIZE + 1)) / 20).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One way to sample, and another that is nearly the same."""

    name: str
    row: Row = field(default_factory=Row)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    wrong: dict[str, object] = field(default_factory=dict)  # what must be told apart

    @property
    def columns(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @property
    def probabilities(self) -> np.ndarray:
        """[VOCAB_SIZE] float64."""
        return exact_probabilities(LOGITS.tolist(), self.row, **self.columns)

    @property
    def wrong_probabilities(self) -> np.ndarray:
        return replace(self, **self.wrong).probabilities  # type: ignore[arg-type]


def exact_probabilities(
    logits: Sequence[float], row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """[vocab_size] float64. No two logits may tie."""
    scaled = [x / temperature for x in by_hand(logits, row, float)]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        ranked = ranked[:top_k]
    target = top_p * math.fsum(weights[token] for token in ranked)
    before = [math.fsum(weights[token] for token in ranked[:rank]) for rank in range(len(ranked))]
    kept = [token for token, mass in zip(ranked, before, strict=True) if mass < target and weights[token] >= min_p]
    exact = np.zeros(len(weights))
    exact[kept] = [weights[token] for token in kept]
    return exact / exact.sum()


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-squared test; 0 where something impossible was counted, 1 where nothing else was possible.

    Outcomes that are expected less than five times are taken as one, as the test is usually done.
    """
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum()).astype(np.float64)
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _tokens(*weights: int) -> list[int]:
    return [int(token) for token in np.argsort(LOGITS)[np.array(weights) - 1]]


def _biased(**values: float) -> Row:
    return Row(bias={_tokens(int(weight[1:]))[0]: value for weight, value in values.items()})


_PENALIZED = Row(
    prompt=_tokens(60, 45, 30, 5), output=_tokens(60, 50, 50, 50, 55, 10), repetition=1.5, frequency=0.4, presence=0.7
)
_BIASED = _biased(w5=2.0, w20=-3.0, w40=0.5, w60=-0.5)
_ALLOWED = Row(allowed=frozenset(range(4, VOCAB_SIZE, 5)))
ASKS_FOR_EVERYTHING = replace(_PENALIZED, bias=_BIASED.bias, allowed=frozenset(range(VOCAB_SIZE)) - {*_tokens(59, 40)})

CASES = [
    Case("no filter", wrong={"temperature": 1.1}),
    Case("temperature 0.5", temperature=0.5, wrong={"temperature": 0.55}),
    Case("temperature 2", temperature=2.0, wrong={"temperature": 1.8}),
    Case("top_k", top_k=7, wrong={"top_k": 8}),
    Case("top_p", top_p=0.5, wrong={"top_p": 0.53}),
    Case("min_p", min_p=0.51, wrong={"min_p": 0.49}),
    Case("all three, top_p of what top_k left", top_k=20, top_p=0.6, min_p=0.5, wrong={"top_k": 0}),
    Case("all three, hot", temperature=2.0, top_k=40, top_p=0.95, min_p=0.75, wrong={"min_p": 0.73}),
    Case("repetition penalty", replace(_PENALIZED, frequency=0, presence=0), wrong={"row": Row()}),
    Case("penalties", _PENALIZED, wrong={"row": replace(_PENALIZED, presence=0.5)}),
    Case("logit_bias", _BIASED, wrong={"row": _biased(w5=2.0, w20=-3.0, w40=0.3, w60=-0.5)}),
    Case("allowed tokens", _ALLOWED, wrong={"row": Row(allowed=frozenset(range(4, 55, 5)))}),
    Case(
        "everything",
        ASKS_FOR_EVERYTHING,
        temperature=0.8,
        top_k=30,
        top_p=0.9,
        min_p=0.2,
        wrong={"row": replace(ASKS_FOR_EVERYTHING, repetition=1.0)},
    ),
]
