"""Token sources of a fake worker: a script, or a hash of seed and position.

A token depends only on its request's tokens, seed and position, so that a recomputed request (after preemption) gets
the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ringcore.protocol.steps import NewRequest

__all__ = ["Script", "ScriptedTokens", "SeededTokens", "TokenSource", "make_token_source"]

# A function of (the request's tokens so far, the position of the next one, the request's seed); or one completion for
# every prompt; or completions by prompt, a tuple of token ids.
Script = Callable[[Sequence[int], int, int], int] | Sequence[int] | Mapping[tuple[int, ...], Sequence[int]]


class TokenSource(Protocol):
    """Samples for rows. `start` is called for every request that gets a row."""

    def start(self, request: NewRequest) -> None: ...

    def sample(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray, num_steps: int) -> np.ndarray:
        """-> [num_rows, num_steps] int32: the tokens of row i at positions[i], positions[i] + 1, ..."""
        ...


def make_token_source(script: Script | None, vocab_size: int, end_of_text: int | None) -> TokenSource:
    return SeededTokens(vocab_size) if script is None else ScriptedTokens(script, vocab_size, end_of_text)


class _MaskedTokens:
    """Masks the stop tokens of requests that have not generated min_tokens yet: a masked token is replaced by the next
    unmasked token of the vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_row: dict[int, tuple[int, frozenset[int]]] = {}  # by row: end position, masked tokens

    def start(self, request: NewRequest) -> None:
        self._by_row.pop(request.row, None)
        masked, min_tokens = frozenset(request.stop_token_ids), request.sampling_params.min_tokens
        if min_tokens and 0 < len(masked) < self._vocab_size:
            self._by_row[request.row] = request.num_prompt_tokens + min_tokens, masked

    def replace(self, row: int, position: int, token: int) -> int:
        end, masked = self._by_row.get(row, (0, frozenset()))
        while position < end and token in masked:
            token = (token + 1) % self._vocab_size
        return token

    def replace_all(self, rows: np.ndarray, positions: np.ndarray, sampled: np.ndarray) -> None:
        if not self._by_row:
            return
        for index, row in enumerate(rows.tolist()):
            if row in self._by_row:
                first = int(positions[index])
                sampled[index] = [self.replace(row, first + i, t) for i, t in enumerate(sampled[index].tolist())]


_HALF = np.uint64(32)
_SEED_STRIDE = np.int64(1 << 24)  # more than the positions of one seed: counters of different seeds do not overlap
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class SeededTokens:
    """Uniform over the vocabulary: a counter-based RNG, a splitmix64-like hash of seed and position."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = np.uint64(vocab_size)
        self._masked = _MaskedTokens(vocab_size)

    def start(self, request: NewRequest) -> None:
        self._masked.start(request)

    def sample(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray, num_steps: int) -> np.ndarray:
        places = positions[:, None] + seeds[:, None] * _SEED_STRIDE + np.arange(num_steps)
        x = places.view(np.uint64) * _GOLDEN
        x ^= x >> _HALF
        x *= _MIX
        x >>= _HALF
        x *= self._vocab_size  # multiply-shift: the upper half of 32 random bits times vocab_size is the token
        x >>= _HALF
        sampled: np.ndarray = x.astype(np.int32)
        self._masked.replace_all(rows, positions, sampled)
        return sampled


class ScriptedTokens:
    """Follows a `Script`. After the end of a given completion it gives the model's EOS, or token 0 without one."""

    def __init__(self, script: Script, vocab_size: int, end_of_text: int | None) -> None:
        self._script, self._vocab_size, self._end = script, vocab_size, end_of_text or 0
        self._masked = _MaskedTokens(vocab_size)
        self._tokens: dict[int, list[int]] = {}  # by row, as all below
        self._num_prompt_tokens: dict[int, int] = {}
        self._completions: dict[int, Sequence[int]] = {}  # unless the script is a function

    def start(self, request: NewRequest) -> None:
        row, tokens = request.row, request.token_ids.tolist()
        self._masked.start(request)
        self._tokens[row], self._num_prompt_tokens[row] = tokens, request.num_prompt_tokens
        match self._script:
            case Mapping():
                self._completions[row] = self._script.get(tuple(tokens[: request.num_prompt_tokens]), ())
            case Sequence():
                self._completions[row] = self._script

    def _next(self, row: int, position: int, seed: int) -> int:
        if callable(self._script):
            return int(self._script(self._tokens[row], position, seed))
        index, completion = position - self._num_prompt_tokens[row], self._completions[row]
        return completion[index] if index < len(completion) else self._end

    def sample(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray, num_steps: int) -> np.ndarray:
        sampled = np.empty((len(rows), num_steps), dtype=np.int32)
        for index, (row, seed) in enumerate(zip(rows.tolist(), seeds.tolist(), strict=True)):
            tokens = self._tokens[row]
            assert len(tokens) == positions[index], "the row has other tokens than were sampled"
            for step in range(num_steps):
                token = self._next(row, len(tokens), seed)
                if not 0 <= token < self._vocab_size:
                    raise ValueError(f"the script gave token {token}; the vocabulary has {self._vocab_size}")
                tokens.append(self._masked.replace(row, len(tokens), token))
                sampled[index, step] = tokens[-1]
        return sampled
