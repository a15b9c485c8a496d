"""A worker and its model without tensors: executes a step as a worker does, and notices every wrong slot it reads.

It knows only what a step tells it, by field names; nothing of the engine is imported. The model's next token is a
function of all tokens before it. Its KV store holds in each slot a fingerprint of the whole prefix that was written
there, so reading a slot that was reused, never written, or found for another prefix is an error at once. All KV cache
groups share the pages: what one group writes into a page, no other can read, and it is gone for the one before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MASK = 2**61 - 1


class WorkersKilled(Exception):
    """A request took its worker down with it."""


class Group(NamedTuple):
    """One KV cache group: tokens in a block, and the tokens that one sees, itself among them (None: all before it)."""

    block_size: int
    window: int | None = None

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The positions from begin to end, block by block: index in the block table, offset, begin, end."""
        while begin < end:
            index, offset = divmod(begin, self.block_size)
            until = min(end, begin - offset + self.block_size)
            yield index, offset, begin, until
            begin = until


class Sampled(NamedTuple):
    """As `ModelRunnerOutput`: rows None where every row of the step sampled."""

    rows: list[int] | None
    token_ids: list[int]
    num_gained: list[int] | None  # tokens of each row; None: as many as steps
    failed: list[int]
    prompts: dict[int, tuple[int, list[int]]]  # by row, of those that are to be told of: how many logprobs, the prompt


def fingerprint(before: int, token: int) -> int:
    """Of a prefix and one more token."""
    return ((before * 0x9E3779B97F4A7C15 + token + 1) ^ (before >> 29)) & MASK


def num_accepted(seed: int, position: int, max_drafts: int) -> int:
    """How many of its drafts the model accepts: 0 to max_drafts, any of them, by seed and position alone."""
    return (seed * 7 + position * position + position // 3) % (max_drafts + 1)


def next_token(last_fingerprint: int, vocab_size: int, barred: list[int]) -> int:
    token = (last_fingerprint >> 7) % vocab_size
    while token in barred:
        token = (token + 1) % vocab_size
    return token


def expected_completion(
    prompt: list[int], *, vocab_size: int, stop_token_ids: list[int], min_tokens: int, max_total_tokens: int
) -> tuple[list[int], str]:
    """What the model generates when it is asked alone, without a cache, and why it ends."""
    completion: list[int] = []
    value = 1
    for token in prompt:
        value = fingerprint(value, token)
    while True:
        token = next_token(value, vocab_size, stop_token_ids if len(completion) < min_tokens else [])
        value = fingerprint(value, token)
        completion.append(token)
        if len(completion) >= min_tokens and token in stop_token_ids:
            return completion, "stop"
        if len(prompt) + len(completion) >= max_total_tokens:
            return completion, "length"


def completion(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens that the model generates from a vocabulary of 50."""
    return expected_completion(
        prompt, vocab_size=50, stop_token_ids=[], min_tokens=0, max_total_tokens=len(prompt) + count
    )[0]


@dataclass
class Row:
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_tables: list[list[int]]  # by group
    stop_token_ids: list[int]
    min_tokens: int
    seed: int
    prefixes: list[int] = field(default_factory=list)  # fingerprints of `tokens`, as far as computed
    poisoned: bool = False  # fails the next time it runs
    drafted: int | None = None  # its accepted drafts begin here, until they are told
    num_prompt_logprobs: int | None = None  # None: nothing is to be told of its prompt

    def catch_up(self) -> None:
        value = self.prefixes[-1] if self.prefixes else 1
        for token in self.tokens[len(self.prefixes) :]:
            value = fingerprint(value, token)
            self.prefixes.append(value)


class FakeWorker:
    """Rows, their block tables, and the KV store."""

    def __init__(
        self, num_blocks: int, groups: list[Group], num_rows: int, vocab_size: int, takes_turns: bool = False
    ) -> None:
        """takes_turns: whether its steps are those of a pipeline."""
        self.takes_turns = takes_turns
        self.num_blocks, self.groups, self.num_rows, self.vocab_size = num_blocks, groups, num_rows, vocab_size
        self.rows: dict[int, Row] = {}
        self.work: dict[int, int] = {}  # of the last step: known tokens by row, in its order
        self.max_gained: dict[int, int] = {}  # of the last step: by row, the most that it may gain
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        self.num_computed_tokens = 0  # the work done, in tokens
        self.killers: dict[int, int] = {}  # by seed: at so many computed tokens the row kills
        # By block: the group that wrote last, and by offset what is there.
        self._pages: list[tuple[int, list[int | None]]] = [(-1, [])] * num_blocks
        self.store: dict[bytes, tuple[int, list[int | None]]] = {}  # what was saved, by name
        self.loads: dict[int, tuple[list[bytes], list[int]]] = {}  # by number: names and blocks, not carried out yet
        self.num_lost = 0  # blocks to load that the store had not

    def execute(self, step) -> Sampled:
        """Applies the step, or steps; returns what they sampled and the rows that failed."""
        rows_before = list(self.work)
        for row in step.finished_rows.tolist():
            del self.rows[row]
        for new in step.new_requests:
            self._start(new)
        self._append_blocks(step.new_blocks)
        rows = rows_before if step.rows is None else step.rows.tolist()
        counts = [1] * len(rows) if step.num_scheduled_tokens is None else step.num_scheduled_tokens.tolist()
        self.work = dict(zip(rows, counts, strict=True))
        assert len(self.work) == len(rows), "a row is twice in one step"
        most = [1] * len(rows) if step.max_gained is None else step.max_gained.tolist()
        self.max_gained = dict(zip(rows, most, strict=True))
        if step.kv_transfers is not None:
            self._transfer(step.kv_transfers)
            if not rows:
                assert step.rows is not None
                return Sampled(None, [], None, [], {})
        assert step.max_gained is None or max(most) > 1, "the most that rows gain is told where it is one each"
        assert step.num_steps == 1 or step.max_gained is None
        assert min(most) >= 1
        assert step.num_tokens == sum(counts) * step.num_steps
        is_steady = rows == rows_before and counts == [1] * len(counts)
        if step.rows is None:
            assert is_steady, "rows are left out only where they are those of the step before, with one token each"
            assert step.num_scheduled_tokens is None
        sampled = self._run(step.num_steps)
        if (
            is_steady
            and not self.takes_turns
            and step.rows is not None
            and len(rows) == len(self.rows)
            and sampled.rows is None
        ):
            assert step.new_requests or len(step.finished_rows), "rows that the workers know are sent again"
        return sampled

    def _transfer(self, transfers) -> None:
        for name in transfers.drops:
            del self.store[name]
        for name, block_id in zip(transfers.save_names, transfers.save_block_ids.tolist(), strict=True):
            assert name not in self.store, "a block is saved twice"
            assert block_id not in self._blocks_loading(), "a block is saved before it is loaded"
            writer, page = self._pages[block_id]
            assert name[0] == writer, "a block is saved for another group"
            assert None not in page, "a block is saved before it is full"
            self.store[name] = writer, list(page)
        for load in transfers.loads:
            ids = load.block_ids.tolist()
            assert not self._blocks_loading() & set(ids), "a block is loaded twice"
            self.loads[load.number] = load.names, ids

    def _blocks_loading(self) -> set[int]:
        return {block_id for _, ids in self.loads.values() for block_id in ids}

    def finish_loads(self, rng: random.Random, failure_rate: float) -> dict[int, list[bool]]:
        """Carries out some loads, as late as this; by load which of its blocks could be read."""
        finished = {}
        for number in [number for number in self.loads if rng.random() < 0.5]:
            names, ids = self.loads.pop(number)
            finished[number] = [self._load(*one, rng.random() < failure_rate) for one in zip(names, ids, strict=True)]
        return finished

    def _load(self, name: bytes, block_id: int, fails: bool) -> bool:
        self.num_lost += name not in self.store
        if fails or name not in self.store:
            self._pages[block_id] = (name[0], [None])
            return False
        writer, page = self.store[name]
        self._pages[block_id] = (writer, list(page))
        return True

    def _run(self, num_steps: int) -> Sampled:
        sampled: dict[int, list[int]] = {index: [] for index in self.work}
        is_varied = max(self.max_gained.values()) > 1
        failed: list[int] = []
        for _ in range(num_steps):
            if num_steps > 1:
                for index in self.work:
                    assert len(self.rows[index].tokens) - self.rows[index].num_computed_tokens == 1
            self._compute()
            for index in self.work:
                self._sample(index, sampled[index], failed)
        gained = {index: tokens for index, tokens in sampled.items() if tokens and index not in failed}
        token_ids = [token for tokens in gained.values() for token in tokens]
        prompts = {
            index: (row.num_prompt_logprobs, row.tokens[: row.num_prompt_tokens])
            for index in gained
            if (row := self.rows[index]).num_prompt_logprobs is not None
        }
        for index in prompts:
            self.rows[index].num_prompt_logprobs = None
        num_gained = [len(tokens) for tokens in gained.values()]
        return Sampled(
            None if len(gained) == len(self.work) else list(gained),
            token_ids,
            num_gained if is_varied and any(num > 1 for num in num_gained) else None,
            failed,
            prompts,
        )

    def _start(self, new) -> None:
        assert new.row not in self.rows, f"row {new.row} is given to two requests"
        assert 0 <= new.row < self.num_rows
        self.rows[new.row] = row = Row(
            tokens=new.token_ids.tolist(),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            num_cached_tokens=new.num_cached_tokens,
            block_tables=[block_ids.tolist() for block_ids in new.block_ids],
            stop_token_ids=new.stop_token_ids,
            min_tokens=new.sampling_params.min_tokens,
            seed=new.seed,
        )
        if len(row.tokens) == row.num_prompt_tokens:
            row.num_prompt_logprobs = new.sampling_params.prompt_logprobs
        assert row.num_prompt_logprobs is None or not new.num_cached_tokens, "a prompt to tell of is partly cached"
        assert new.num_computed_tokens < len(row.tokens), "nothing is left to compute"
        assert new.num_computed_tokens == min(new.num_cached_tokens, len(row.tokens) - 1)
        assert len(row.block_tables) == len(self.groups)
        for group, table in zip(self.groups, row.block_tables, strict=True):
            num_left_behind = group.first_seen(row.num_computed_tokens) // group.block_size
            assert 0 not in table[num_left_behind:], "the null block where there is something to read"
            assert all(0 <= block_id < self.num_blocks for block_id in table), "a block outside the cache"
        self._check_each_once(row)

    def _append_blocks(self, new_blocks) -> None:
        assert len(new_blocks) in (0, len(self.groups))
        changed = {}
        for i, new in enumerate(new_blocks):
            for index, block_id in zip(new.rows.tolist(), new.block_ids.tolist(), strict=True):
                assert 0 < block_id < self.num_blocks, "the null block, or one outside the cache"
                changed[index] = self.rows[index]
                changed[index].block_tables[i].append(block_id)
        assert changed or not new_blocks, "new blocks by group, and none in any"
        for row in changed.values():
            self._check_each_once(row)

    def _live_blocks(self, row: Row) -> list[int]:
        """The blocks that the row may still read or write, of all groups."""
        return [
            block_id
            for group, table in zip(self.groups, row.block_tables, strict=True)
            for block_id in table[group.first_seen(row.num_computed_tokens) // group.block_size :]
        ]

    def _check_each_once(self, row: Row) -> None:
        blocks = self._live_blocks(row)
        assert len(set(blocks)) == len(blocks), "a block is twice in one row"

    def _compute(self) -> None:
        """Every key is written before any is read, as in a layer."""
        for index, num_tokens in self.work.items():
            row = self.rows[index]
            most = row.num_computed_tokens + num_tokens + self.max_gained[index] - 1
            if most >= self.killers.get(row.seed, math.inf):
                raise WorkersKilled(row.seed)
        live = {index: self._live_blocks(row) for index, row in self.rows.items()}
        loading = self._blocks_loading()
        assert not any(loading & set(blocks) for blocks in live.values()), "a row has a block that is being loaded"
        for index, num_tokens in self.work.items():
            others = {block_id for other, blocks in live.items() if other != index for block_id in blocks}
            self._write(self.rows[index], num_tokens, others)
        for index, num_tokens in self.work.items():
            self._read(self.rows[index], num_tokens)
        for index in self.work:
            self._verify_drafts(self.rows[index], self.max_gained[index] - 1, live, index)

    def _verify_drafts(self, row: Row, max_drafts: int, live: dict[int, list[int]], own: int) -> None:
        """Computes as many drafts as the row may have: the first ones are the model's own tokens, and accepted; the
        slots of the others are filled with what no prefix has.
        """
        if not max_drafts:
            return
        assert row.num_computed_tokens == len(row.tokens), "drafts after a chunk of a prompt"
        accepted = num_accepted(row.seed, len(row.tokens), max_drafts)
        num_known = len(row.tokens)
        others = {block_id for other, blocks in live.items() if other != own for block_id in blocks}
        for _ in range(accepted):
            row.tokens.append(self._next_token(row))
            self._write(row, 1, others)
            self._read(row, 1)
        self.num_accepted_drafts += accepted
        self.num_rejected_drafts += max_drafts - accepted
        end = num_known + max_drafts
        for i, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
            for index, offset, first, until in group.spans(len(row.tokens), end):
                block_id = table[index]
                assert block_id not in others, f"a draft in block {block_id}, which another row has"
                if self._pages[block_id][0] != i:
                    self._pages[block_id] = (i, [None] * group.block_size)
                self._pages[block_id][1][offset : offset + until - first] = [None] * (until - first)
        row.drafted = num_known

    def _write(self, row: Row, num_tokens: int, others: set[int]) -> None:
        """Writes what the row computes, but for what its prompt found: that may be another's too."""
        begin, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        assert begin < end <= len(row.tokens), "a step computes tokens that the row does not have"
        row.catch_up()
        for i, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
            for index, offset, first, until in group.spans(max(begin, row.num_cached_tokens), end):
                block_id = table[index]
                assert block_id not in others, f"block {block_id} is written while another row has it"
                if self._pages[block_id][0] != i:
                    self._pages[block_id] = (i, [None] * group.block_size)
                self._pages[block_id][1][offset : offset + until - first] = row.prefixes[first:until]

    def _read(self, row: Row, num_tokens: int) -> None:
        begin = row.num_computed_tokens
        row.num_computed_tokens += num_tokens
        self.num_computed_tokens += num_tokens
        for i, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
            for index, offset, first, until in group.spans(group.first_seen(begin), row.num_computed_tokens):
                writer, page = self._pages[table[index]]
                assert writer == i, f"group {i} reads block {table[index]}, which group {writer} wrote"
                found = page[offset : offset + until - first]
                assert found == row.prefixes[first:until], f"positions from {first} read another prefix's slots"

    def _sample(self, index: int, sampled: list[int], failed: list[int]) -> None:
        row = self.rows[index]
        if row.poisoned:
            row.poisoned = False
            failed.append(index)
        if row.num_computed_tokens < len(row.tokens):
            return
        begin, row.drafted = len(row.tokens) if row.drafted is None else row.drafted, None
        row.tokens.append(self._next_token(row))
        sampled += row.tokens[begin:]

    def _next_token(self, row: Row) -> int:
        barred = row.stop_token_ids if len(row.tokens) - row.num_prompt_tokens < row.min_tokens else []
        return next_token(row.prefixes[-1], self.vocab_size, barred)
