"""Rows that ask for biases, penalties and allowed tokens: as plain data, as the tensors of a batch, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ringcore.model_executor.logit_adjustments import IN_PROMPT, LogitAdjustments


@dataclass(frozen=True)
class Row:
    """What `SamplingParams` and a request's tokens say of one row."""

    bias: dict[int, float] = field(default_factory=dict)
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    allowed: frozenset[int] | None = None

    @property
    def is_counted(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


def by_hand(
    logits: Sequence[float],
    row: Row,
    number: Callable[[Any], Any] = np.float32,
    *,
    bias: bool = True,
    penalties: bool = True,
    masks: bool = True,
) -> list[Any]:
    """The documented operations in their order, a token at a time; every result is a `number`."""
    x = [number(logit) for logit in logits]
    if bias:
        for token, value in row.bias.items():
            x[token] = x[token] + number(value)
    if penalties and row.is_counted:
        for token in set(row.prompt) | set(row.output):
            is_above = x[token] > 0
            x[token] = x[token] / number(row.repetition) if is_above else x[token] * number(row.repetition)
        for token in set(row.output):
            x[token] = x[token] - number(row.frequency) * number(list(row.output).count(token))
            x[token] = x[token] - number(row.presence)
    if masks and row.allowed is not None:
        for token in range(len(x)):
            if token not in row.allowed and not math.isnan(x[token]):
                x[token] = number(-math.inf)
    return x


def adjustments_of(
    rows: Sequence[Row], vocab_size: int, device: torch.device | str = "cpu", seed: int = 0
) -> LogitAdjustments:
    """Slots and biases lie in an order of their own, among others' that would be noticed."""
    rng = np.random.default_rng(seed)
    n, num_words = len(rows), -(-vocab_size // 32)
    order = rng.permutation(n)
    columns = np.full((3, n), math.nan, np.float32)  # to be read only where there is a slot
    slots = np.full((2, n), -1, np.int32)
    counts, masks = [np.full(vocab_size, IN_PROMPT + 7, np.int32)], [np.zeros(num_words, np.uint32)]
    edges = np.zeros((2, n), np.int32)
    ids, values = [0], [math.nan]
    for i in order:
        row = rows[i]
        edges[0, i] = len(ids)
        ids += sorted(row.bias)
        values += [row.bias[token] for token in sorted(row.bias)]
        edges[1, i] = len(ids)
        if row.is_counted:
            columns[:, i] = row.repetition, row.frequency, row.presence
            slots[0, i] = len(counts)
            count = np.bincount(np.asarray(row.output, np.int64), minlength=vocab_size).astype(np.int32)
            count[list(set(row.prompt))] += IN_PROMPT
            counts.append(count)
        if row.allowed is not None:
            slots[1, i] = len(masks)
            mask = np.zeros(num_words, np.uint32)
            for token in (*row.allowed, *range(vocab_size, 32 * num_words)):  # what lies behind is no token's
                mask[token // 32] |= np.uint32(1 << token % 32)
            masks.append(mask)

    def placed(array: Any, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array(array, dtype)).to(device)

    return LogitAdjustments(
        repetition_penalty=placed(columns[0], np.float32),
        frequency_penalty=placed(columns[1], np.float32),
        presence_penalty=placed(columns[2], np.float32),
        counts_slot=placed(slots[0], np.int32),
        counts=placed(counts, np.int32),
        bias_start=placed(edges[0], np.int32),
        bias_end=placed(edges[1], np.int32),
        bias_ids=placed(ids, np.int32),
        bias_values=placed(values, np.float32),
        mask_slot=placed(slots[1], np.int32),
        masks=placed(np.stack(masks).view(np.int32), np.int32),
    )


def random_row(rng: np.random.Generator, vocab_size: int, num_bias: int = 6) -> Row:
    """Each part with an even chance; repeated tokens, and tokens of the prompt that are generated too."""

    def some(most: int) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(0, most + 1)).tolist()

    wants_bias, wants_penalties, wants_mask = rng.random(3) < 0.5
    biased = rng.choice(vocab_size, min(vocab_size, num_bias), replace=False).tolist() if wants_bias else []
    common = some(8)
    return Row(
        bias={token: float(np.float32(rng.uniform(-100, 100))) for token in biased},
        prompt=some(20) + common,
        output=some(20) + common * int(rng.integers(0, 5)),
        repetition=float(np.float32(rng.uniform(0.1, 2))) if wants_penalties else 1.0,
        frequency=float(np.float32(rng.uniform(-2, 2))) if wants_penalties else 0.0,
        presence=float(np.float32(rng.uniform(-2, 2))) if wants_penalties else 0.0,
        allowed=frozenset([*some(vocab_size), int(rng.integers(vocab_size))]) if wants_mask else None,
    )


def random_rows(n: int, vocab_size: int, seed: int = 0) -> list[Row]:
    """The first two ask for nothing and for everything."""
    rng = np.random.default_rng(seed)
    everything = Row(
        bias={0: 3.5, vocab_size - 1: -2.25},
        prompt=[0, vocab_size // 2],
        output=[vocab_size // 2, vocab_size - 1, vocab_size - 1],
        repetition=1.25,
        frequency=0.5,
        presence=-0.75,
        allowed=frozenset({0, vocab_size // 2, vocab_size - 1}),
    )
    return [Row(), everything, *(random_row(rng, vocab_size) for _ in range(n))][:n]


def random_logits(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """[n, vocab_size] float32 of both signs, some of them -inf, inf or NaN."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((n, vocab_size)) * 4).astype(np.float32)
    for value, chance in ((-math.inf, 0.05), (math.inf, 0.01), (math.nan, 0.01)):
        logits[rng.random((n, vocab_size)) < chance] = value
    return torch.from_numpy(logits)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit, but for the kind of NaN and the sign of 0."""
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)
