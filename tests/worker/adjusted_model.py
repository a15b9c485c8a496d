"""What a row with adjusted logits has to write, one whole forward pass a token, by plain loops over a plain list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sampling_rows import record

from ringcore.model_executor.sampler import SamplingInputs, sample
from ringcore.params.sampling_params import SamplingParams

__all__ = ["Arithmetic", "expected_tokens"]


class Arithmetic:
    """Stands in for a worker's grammars: token t may be followed by t + step alone, and by the end behind `last`."""

    def __init__(self, eos_token_id: int, vocab_size: int) -> None:
        self.eos_token_id, self.vocab_size = eos_token_id, vocab_size
        self.num_filled = 0

    def matcher(self, spec: Any) -> Progression:
        first, step, last = map(int, spec.regex.split())
        return Progression(first, step, last)

    def fill_bitmasks(self, matchers: Sequence[Progression], masks: np.ndarray) -> None:
        self.num_filled += len(matchers)
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        words = masks.view(np.uint32)
        words[:] = 0
        for row, matcher in zip(words, matchers, strict=True):
            token = matcher.next if matcher.next <= matcher.last else self.eos_token_id
            if matcher.next != matcher.last + 1000:
                row[token // 32] |= np.uint32(1 << token % 32)


class Progression:
    failure = None

    def __init__(self, first: int, step: int, last: int) -> None:
        self.next, self.step, self.last = first, step, last

    @property
    def is_over(self) -> bool:
        return self.next > self.last

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            assert token_id >= 0, "a token that is not known"
            if token_id != self.next:
                return False
            self.next += self.step
        return True


def expected_tokens(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
    seed: int = 0,
) -> list[int]:
    """Up to `count` tokens, the first of `stops` the last one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        with torch.inference_mode():
            row = model(torch.tensor([tokens])).logits[0, -1].tolist()
        written = tokens[len(prompt) :]
        _adjust(row, prompt, written, params, bad_words)
        if len(written) < params.min_tokens:
            for stop in stops:
                row[stop] = -math.inf
        none = np.zeros(0, dtype=np.int64)
        inputs = SamplingInputs(record(params, seed)[None], np.array([len(tokens)]), none, none)
        tokens.append(int(sample(torch.tensor([row]), inputs).token_ids[0]))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def _adjust(
    row: list[float],
    prompt: Sequence[int],
    written: list[int],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
) -> None:
    for token, value in (params.logit_bias or {}).items():
        row[token] += value
    for token in {*prompt, *written}:
        r = params.repetition_penalty
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token in set(written):
        row[token] -= params.frequency_penalty * written.count(token) + params.presence_penalty
    args = params.extra_args or {}
    if "push" in args:
        row[args["push"]] += 30
    if "no_repeat" in args:
        for token in written[-args["no_repeat"] :]:
            row[token] = -math.inf
    barred = set() if params.allowed_token_ids is None else set(range(len(row))) - set(params.allowed_token_ids)
    barred |= {word[-1] for word in bad_words if len(word) == 1 or written[1 - len(word) :] == list(word[:-1])}
    for token in barred:
        row[token] = -math.inf
