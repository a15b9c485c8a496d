"""A worker and its model without tensors: executes a step as a worker does, and notices every wrong slot it reads.

It knows only what a step tells it, by field names; nothing of the engine is imported. The model's next token is a
function of all tokens before it. Its KV store holds in each slot a fingerprint of the whole prefix that was written
there, so reading a slot that was reused, never written, or found for another prefix is an error at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MASK = 2**61 - 1
NO_SLOT_YET = "never written"


class WorkersKilled(Exception):
    """A request took its worker down with it."""


def fingerprint(before: int, token: int) -> int:
    """Of a prefix and one more token."""
    return ((before * 0x9E3779B97F4A7C15 + token + 1) ^ (before >> 29)) & MASK


def fingerprints(tokens: list[int]) -> list[int]:
    """Of every prefix: element i is that of tokens[: i + 1]."""
    result, value = [], 1
    for token in tokens:
        value = fingerprint(value, token)
        result.append(value)
    return result


def next_token(last_fingerprint: int, vocab_size: int, barred: list[int]) -> int:
    token = (last_fingerprint >> 7) % vocab_size
    while token in barred:
        token = (token + 1) % vocab_size
    return token


def expected_completion(
    prompt: list[int], *, vocab_size: int, stop_token_ids: list[int], min_tokens: int, max_total_tokens: int
) -> tuple[list[int], str]:
    """What the model generates when it is asked alone, without a cache, and why it ends."""
    tokens = list(prompt)
    while True:
        generated = len(tokens) - len(prompt)
        barred = stop_token_ids if generated < min_tokens else []
        tokens.append(next_token(fingerprints(tokens)[-1], vocab_size, barred))
        if generated + 1 >= min_tokens and tokens[-1] in stop_token_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= max_total_tokens:
            return tokens[len(prompt) :], "length"


@dataclass
class Row:
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    stop_token_ids: list[int]
    min_tokens: int
    seed: int
    prefixes: list[int] = field(default_factory=list)  # fingerprints of `tokens`, as far as computed
    poisoned: bool = False  # fails the next time it runs

    def catch_up(self) -> None:
        self.prefixes += fingerprints(self.tokens)[len(self.prefixes) :]


@dataclass
class FakeWorker:
    """Rows, their block tables, and the KV store."""

    num_blocks: int
    block_size: int
    num_rows: int
    vocab_size: int
    rows: dict[int, Row] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    num_computed_tokens: int = 0  # the work done, in tokens
    killers: dict[int, int] = field(default_factory=dict)  # by seed: at so many computed tokens the row kills

    def execute(self, step) -> tuple[list[int], list[int], list[int]]:
        """Applies the step; returns the rows that sampled, their tokens, and the rows that failed."""
        for row in step.finished_rows.tolist():
            del self.rows[row]
        for new in step.new_requests:
            self._start(new)
        for row, block_id in zip(step.new_block_rows.tolist(), step.new_block_ids.tolist(), strict=True):
            self._append_block(self.rows[row], block_id)
        work = list(zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True))
        assert len({row for row, _ in work}) == len(work), "a row is twice in one step"
        self._kill(work)
        for row, num_tokens in work:  # every key is written before any is read, as in a layer
            self._write(self.rows[row], num_tokens)
        for row, num_tokens in work:
            self._read(self.rows[row], num_tokens)
        return self._sample(work)

    def _kill(self, work: list[tuple[int, int]]) -> None:
        for row, num_tokens in ((self.rows[index], num_tokens) for index, num_tokens in work):
            if row.num_computed_tokens + num_tokens >= self.killers.get(row.seed, math.inf):
                raise WorkersKilled(row.seed)

    def _start(self, new) -> None:
        assert new.row not in self.rows, f"row {new.row} is given to two requests"
        assert 0 <= new.row < self.num_rows
        self.rows[new.row] = row = Row(
            tokens=new.token_ids.tolist(),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=[],
            stop_token_ids=new.stop_token_ids,
            min_tokens=new.sampling_params.min_tokens,
            seed=new.seed,
        )
        assert new.num_computed_tokens < len(row.tokens), "nothing is left to compute"
        for block_id in new.block_ids.tolist():
            self._append_block(row, block_id)

    def _append_block(self, row: Row, block_id: int) -> None:
        assert 0 < block_id < self.num_blocks, "the null block, or one outside the cache"
        assert block_id not in row.block_ids
        row.block_ids.append(block_id)

    def _slot(self, row: Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: Row, num_tokens: int) -> None:
        begin, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        assert begin < end <= len(row.tokens), "a step computes tokens that the row does not have"
        row.catch_up()
        for position in range(begin, end):
            self.slots[self._slot(row, position)] = row.prefixes[position]

    def _read(self, row: Row, num_tokens: int) -> None:
        row.num_computed_tokens += num_tokens
        self.num_computed_tokens += num_tokens
        for position in range(row.num_computed_tokens):
            found = self.slots.get(self._slot(row, position), NO_SLOT_YET)
            assert found == row.prefixes[position], f"position {position} reads another prefix's slot: {found}"

    def _sample(self, work: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
        sampled, token_ids, failed = [], [], []
        for index, _ in work:
            row = self.rows[index]
            if row.poisoned:
                row.poisoned = False
                failed.append(index)
            if row.num_computed_tokens < len(row.tokens):
                continue
            barred = row.stop_token_ids if len(row.tokens) - row.num_prompt_tokens < row.min_tokens else []
            token = next_token(row.prefixes[-1], self.vocab_size, barred)
            row.tokens.append(token)
            if index not in failed:
                sampled.append(index)
                token_ids.append(token)
        return sampled, token_ids, failed
