"""Where a fake worker's tokens come from: a script, or a hash of seed and position.

A token must depend on nothing but its request's tokens, seed and position, so that a request which is computed again
gets the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ringcore.protocol.steps import NewRequest

__all__ = ["Script", "ScriptedTokens", "SeededTokens", "TokenSource", "make_token_source"]

# A function of (the request's tokens so far, the position of the next one, the request's seed); or the completion of
# every prompt; or completions by prompt, a tuple of token ids.
Script = Callable[[Sequence[int], int, int], int] | Sequence[int] | Mapping[tuple[int, ...], Sequence[int]]


class TokenSource(Protocol):
    """Samples tokens for rows. `FakeWorker` notifies it of every request that gets a row."""

    def start(self, request: NewRequest) -> None: ...

    def sample(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray, num_steps: int) -> np.ndarray:
        """-> [num_rows, num_steps] int32: the tokens of row i at positions[i], positions[i] + 1, ..."""
        ...


def make_token_source(script: Script | None, vocab_size: int, end_of_text: int | None) -> TokenSource:
    return SeededTokens(vocab_size) if script is None else ScriptedTokens(script, vocab_size, end_of_text)


class _BarredTokens:
    """The stop tokens of requests that have not generated min_tokens yet. Where one would come, the next token of the
    vocabulary comes that is none.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_row: dict[int, tuple[int, frozenset[int]]] = {}  # up to which position, which tokens

    def start(self, request: NewRequest) -> None:
        self._by_row.pop(request.row, None)
        barred, min_tokens = frozenset(request.stop_token_ids), request.sampling_params.min_tokens
        if min_tokens and 0 < len(barred) < self._vocab_size:
            self._by_row[request.row] = request.num_prompt_tokens + min_tokens, barred

    def replace(self, row: int, position: int, token: int) -> int:
        end, barred = self._by_row.get(row, (0, frozenset()))
        while position < end and token in barred:
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
_SEED_STRIDE = np.int64(1 << 24)  # positions of one seed come before those of the next
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class SeededTokens:
    """Spread evenly over the vocabulary, by a hash of seed and position in the manner of splitmix64."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = np.uint64(vocab_size)
        self._barred = _BarredTokens(vocab_size)

    def start(self, request: NewRequest) -> None:
        self._barred.start(request)

    def sample(self, rows: np.ndarray, seeds: np.ndarray, positions: np.ndarray, num_steps: int) -> np.ndarray:
        places = positions[:, None] + seeds[:, None] * _SEED_STRIDE + np.arange(num_steps)
        x = places.view(np.uint64) * _GOLDEN
        x ^= x >> _HALF
        x *= _MIX
        x >>= _HALF
        x *= self._vocab_size  # 32 random bits times the vocabulary: the upper half is the token
        x >>= _HALF
        sampled: np.ndarray = x.astype(np.int32)
        self._barred.replace_all(rows, positions, sampled)
        return sampled


class ScriptedTokens:
    """Follows a `Script`. Where a written completion is over, the model's end of text; where it has none, token 0."""

    def __init__(self, script: Script, vocab_size: int, end_of_text: int | None) -> None:
        self._script, self._vocab_size, self._end = script, vocab_size, end_of_text or 0
        self._barred = _BarredTokens(vocab_size)
        self._tokens: dict[int, list[int]] = {}  # by row, as all below
        self._num_prompt_tokens: dict[int, int] = {}
        self._completions: dict[int, Sequence[int]] = {}  # where the script is written down

    def start(self, request: NewRequest) -> None:
        row, tokens = request.row, request.token_ids.tolist()
        self._barred.start(request)
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
                tokens.append(self._barred.replace(row, len(tokens), token))
                sampled[index, step] = tokens[-1]
        return sampled
