"""Random caches under random rows, beside two models: of what can be found, and of what lies in the slots.

The slots of the model hold what the kernels would have written; every token that is computed looks at all that it sees.
"""

from __future__ import annotations

import numpy as np
from cache_driver import User, cache_config, chunked, full, latent, start_row, window
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from samples import num_examples

from ringcore.kv_cache.block_hash import BlockHasher, ExtraKeys
from ringcore.kv_cache.cached_prefix import CachedPrefix
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import ChunkedAttentionSpec, LocalAttentionSpec, SlidingWindowSpec

MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_PROMPT = 4, 40, 24

windows = st.integers(1, 12)
layouts = st.one_of(
    st.sampled_from([[full(4)], [full(1)], [full(2), full(4)], [full(8), full(2)], [latent(4)], [latent(2), full(4)]]),
    st.builds(lambda w, size: [window(w, size)], windows, st.sampled_from([1, 2, 4])),
    st.builds(lambda w: [full(4), window(w, 4)], windows),
    st.builds(lambda w: [window(w, 2), full(4)], windows),
    st.builds(lambda w: [latent(4), window(w, 2)], windows),
    st.builds(lambda w, v: [window(w, 8), full(2), window(v, 4)], windows, windows),
    st.builds(lambda c, size: [chunked(c, size)], windows, st.sampled_from([1, 2, 4])),
    st.builds(lambda c: [full(4), chunked(c, 4)], windows),
    st.builds(lambda c, w: [chunked(c, 2), full(4), window(w, 2)], windows, windows),
)
lengths = st.one_of(st.integers(1, MAX_PROMPT), st.sampled_from([8, 16, 24]))
differences = st.one_of(st.none(), st.integers(0, MAX_PROMPT))  # where a prompt goes its own way
salts = st.sampled_from([None, None, None, "salt"])
counts = st.integers(1, 9)


class Row:
    """A request that runs. All of its tokens are known to the test; to the cache, those up to `num_known`."""

    def __init__(self, user: User, tokens: list[int], prefix: CachedPrefix, num_now: int) -> None:
        self.user = user
        self.tokens = tokens
        self.num_prompt_tokens = len(user.tokens)
        self.num_cached = prefix.num_cached_tokens
        self.confirmed = self.published = prefix.num_computed_tokens
        self.computed = num_now

    @property
    def num_known(self) -> int:
        return max(self.num_prompt_tokens, self.confirmed + 1)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        specs=layouts,
        spare=st.integers(0, 12),
        in_flight=st.integers(1, 9),
        caching=st.sampled_from([True, True, False]),
    )
    def begin(self, specs, spare, in_flight, caching) -> None:
        sizes = {"max_model_len": MAX_MODEL_LEN, "max_tokens_in_flight": in_flight}
        most = cache_config(*specs, **sizes).blocks_needed(MAX_MODEL_LEN)
        self.config = cache_config(*specs, num_blocks=most + 1 + spare, **sizes)
        self.specs, self.in_flight, self.caching = specs, in_flight, caching
        block_sizes = [spec.block_size for spec in specs]
        self.alignment = max(block_sizes)
        hasher = BlockHasher(min(block_sizes), seed=1)
        self.cache = KVCacheManager(
            self.config, max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=caching, hasher=hasher
        )
        self.token_ids = np.zeros((MAX_NUM_SEQS, MAX_MODEL_LEN), np.int32)
        self.rows: dict[int, Row] = {}
        self.waiting: list[User] = []  # preempted: they keep their hashes
        self.found: list[dict[object, int]] = [{} for _ in specs]  # by group: what a block holds -> block id
        self.slots: dict[tuple[int, int], object] = {}  # (block id, offset) -> (group, what was written)

    # The models.

    def key(self, user: User, tokens: list[int], num_tokens: int) -> object:
        return user.extra_keys.cache_salt, tuple(tokens[:num_tokens])

    def first_needed(self, group: int, position: int) -> int:
        """The first block that a token at `position` sees."""
        return self.first_seen(group, position) // self.specs[group].block_size

    def first_seen(self, group: int, position: int) -> int:
        """The first token that a token at `position` sees."""
        match self.specs[group]:
            case SlidingWindowSpec(sliding_window=size):
                return max(position - size + 1, 0)
            case ChunkedAttentionSpec(chunk_size=size):
                return position - position % size
            case _:
                return 0

    def expected_prefix(self, user: User) -> CachedPrefix:
        tokens, num_tokens = list(user.tokens), len(user.tokens)
        if not self.caching:
            return CachedPrefix(0, 0, tuple([] for _ in self.specs), is_awaited=False)
        length = num_tokens // self.alignment * self.alignment
        while (blocks := self.blocks_for(user, tokens, length)) is None:
            length -= self.alignment
        end = length + self.alignment
        key = self.key(user, tokens, end)
        is_awaited = end <= num_tokens and any(
            max(row.num_cached, row.published // self.alignment * self.alignment) < end <= row.num_prompt_tokens
            and self.key(row.user, row.tokens, end) == key
            for row in self.rows.values()
        )
        return CachedPrefix(min(length, num_tokens - 1), length, blocks, is_awaited)

    def blocks_for(self, user: User, tokens: list[int], length: int) -> tuple[list[int], ...] | None:
        """By group the blocks of a prefix of `length` tokens, if all that the next token sees are found."""
        blocks = []
        for group, spec in enumerate(self.specs):
            first, end = self.first_needed(group, min(length, len(tokens) - 1)), length // spec.block_size
            keys = [self.key(user, tokens, (block + 1) * spec.block_size) for block in range(end)]
            if any(key not in self.found[group] for key in keys[min(first, max(end - 1, 0)) :]):
                return None
            blocks.append([0 if block < first else self.found[group][key] for block, key in enumerate(keys)])
        return tuple(blocks)

    def taken(self, ids: list[int]) -> None:
        """New blocks in a table: what they were found by is forgotten."""
        for found in self.found:
            for key in [key for key, block_id in found.items() if block_id in ids]:
                del found[key]

    def compute(self, at: int, begin: int, end: int) -> None:
        """The kernels write and read the slots of positions `begin` to `end`."""
        row = self.rows[at]
        for group, table in enumerate(self.cache.block_ids(at)):
            size = self.specs[group].block_size
            for position in range(begin, end):
                if position >= row.num_cached:  # of a prompt that is wholly cached the last slot is not written
                    slot = int(table[position // size]), position % size
                    assert slot[0], "a token without a slot"
                    self.slots[slot] = group, self.key(row.user, row.tokens, position + 1)
            for position in range(begin, end):
                for seen in range(self.first_seen(group, position), position + 1):
                    slot = int(table[seen // size]), seen % size
                    assert self.slots[slot] == (group, self.key(row.user, row.tokens, seen + 1)), "it sees another's"

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([*self.rows], np.int64), np.array([row.confirmed for row in self.rows.values()], np.int64)

    def publish(self) -> None:
        for at, row in self.rows.items():
            self.token_ids[at, : row.num_known] = row.tokens[: row.num_known]
        self.cache.publish(self.columns()[0], self.token_ids, self.columns()[1])
        for group, found in enumerate(self.found if self.caching else []):
            size = self.specs[group].block_size
            for at, row in self.rows.items():
                table = self.cache.block_ids(at)[group].tolist()
                for block in range(max(row.published, row.num_cached) // size, row.confirmed // size):
                    if table[block]:
                        found.setdefault(self.key(row.user, row.tokens, (block + 1) * size), table[block])
        for row in self.rows.values():
            row.published = row.confirmed

    def release(self) -> None:
        num_free, before = self.cache.num_free_blocks, {at: self.held(at) for at in self.rows}
        released = self.cache.release_window(*self.columns())
        assert released == (before != {at: self.held(at) for at in self.rows})
        assert self.cache.num_free_blocks >= num_free
        for at, row in self.rows.items():
            for group, table in enumerate(self.cache.block_ids(at)):
                if isinstance(self.specs[group], LocalAttentionSpec):
                    first = min(self.first_needed(group, row.confirmed), len(table))
                    assert not table[:first].any(), "a block is kept that no token sees"

    def held(self, at: int) -> int:
        return sum(int(np.count_nonzero(table)) for table in self.cache.block_ids(at))

    def free(self, at: int) -> None:
        """Returns what ran, as it would come again."""
        self.cache.free_rows(np.array([at]))
        row = self.rows.pop(at)
        if row.num_known < MAX_PROMPT:
            known = row.tokens[row.num_prompt_tokens : row.num_known]
            row.user.tokens = np.append(row.user.tokens, np.array(known, np.int32))
            self.waiting.append(row.user)

    # What happens.

    @precondition(lambda self: len(self.rows) < MAX_NUM_SEQS)
    @rule(length=lengths, difference=differences, salt=salts, chunk=counts)
    def arrive(self, length, difference, salt, chunk) -> None:
        self.arrive_now(length, difference, salt, chunk)

    def arrive_now(self, length: int, difference: int | None, salt: str | None, chunk: int) -> None:
        tokens = [position if position != difference else 99 for position in range(length)]
        self.start(User(tokens, ExtraKeys(cache_salt=salt)), chunk)

    @precondition(lambda self: len(self.rows) < MAX_NUM_SEQS)
    @rule(requests=st.lists(st.tuples(lengths, differences, counts), min_size=1, max_size=6))
    def serve(self, requests) -> None:
        """One after the other, each to its end."""
        for length, difference, chunk in requests:
            num_rows = len(self.rows)
            self.arrive_now(length, difference, None, chunk)
            if len(self.rows) > num_rows:
                user = list(self.rows.values())[-1].user
                while (at := self.row_of(user)) is not None and self.rows[at].confirmed < length:
                    self.rows[at].confirmed = self.rows[at].computed
                    self.advance(sorted(self.rows).index(at), [chunk])
                    self.agrees()
                if at is not None:
                    self.publish()
                    self.free(at)

    def row_of(self, user: User) -> int | None:
        return next((at for at, row in self.rows.items() if row.user is user), None)

    @precondition(lambda self: self.waiting and len(self.rows) < MAX_NUM_SEQS)
    @rule(index=st.integers(0, 9), chunk=counts)
    def come_again(self, index, chunk) -> None:
        self.start(self.waiting.pop(index % len(self.waiting)), chunk)

    def start(self, user: User, chunk: int) -> None:
        prefix = self.cache.find_cached_prefix(user)
        assert prefix == self.expected_prefix(user)
        num_tokens, num_computed = len(user.tokens), prefix.num_computed_tokens
        num_now = min(num_computed + min(chunk, self.in_flight), num_tokens)
        at = min(set(range(MAX_NUM_SEQS)) - self.rows.keys())
        in_prefix = {block_id for ids in prefix.block_ids for block_id in ids if block_id}
        in_use = {int(i) for other in self.rows for table in self.cache.block_ids(other) for i in table}
        needed = self.cache.blocks_needed(num_tokens) - len(in_prefix & in_use)
        num_free = self.cache.num_free_blocks
        assert self.cache.blocks_to_start(num_tokens, prefix) == needed
        started = start_row(self.cache, at, user, num_tokens, num_now, prefix)
        assert started == (needed <= num_free)
        if not started:
            assert self.cache.num_free_blocks == num_free
            self.waiting.append(user)
            return
        self.rows[at] = Row(user, [*user.tokens, *range(num_tokens, MAX_MODEL_LEN)], prefix, num_now)
        tables = [table.tolist() for table in self.cache.block_ids(at)]
        for ids, table in zip(prefix.block_ids, tables, strict=True):
            assert table[: len(ids)] == ids
            self.taken(table[len(ids) :])
        self.compute(at, num_computed, num_now)

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 3), counts=st.lists(counts, min_size=1, max_size=MAX_NUM_SEQS))
    def step(self, index, counts) -> None:
        """Rows compute some tokens each, as many as may be in flight; where blocks lack, another row is preempted."""
        self.advance(index, counts)

    @precondition(lambda self: self.rows)
    @rule(counts=st.lists(counts, min_size=8, max_size=24))
    def steps(self, counts) -> None:
        """Several steps of all rows, each of which comes back before the next."""
        for count in counts:
            for row in self.rows.values():
                row.confirmed = row.computed
            if self.rows:
                self.advance(0, [count] * MAX_NUM_SEQS)

    def advance(self, index: int, counts: list[int]) -> None:
        self.publish()
        self.release()
        ats = sorted(self.rows)[index % len(self.rows) :][: len(counts)]
        ends = {}
        for at, count in zip(ats, counts, strict=False):
            row = self.rows[at]
            ends[at] = min(row.computed + count, row.confirmed + self.in_flight, MAX_MODEL_LEN)
        while self.missing(ends) > self.cache.num_free_blocks:
            assert len(self.rows) > 1, "a row that has the cache to itself always finds its blocks"
            victim = max(self.rows)
            self.free(victim)
            ends.pop(victim, None)
        ends = {at: end for at, end in ends.items() if end > self.rows[at].computed}
        if not ends:
            return
        before = {at: [len(table) for table in self.cache.block_ids(at)] for at in ends}
        num_missing, num_free = self.missing(ends), self.cache.num_free_blocks
        taken = self.cache.extend(np.array([*ends], np.int64), np.array([*ends.values()], np.int64))
        assert num_free - self.cache.num_free_blocks == num_missing == sum(len(ids) for _, ids in taken)
        for group, (at_rows, ids) in enumerate(taken):
            self.taken(ids.tolist())
            for at in ends:
                table = self.cache.block_ids(at)[group].tolist()
                assert table[before[at][group] :] == ids[at_rows == at].tolist()
        for at, end in ends.items():
            self.compute(at, self.rows[at].computed, end)
            self.rows[at].computed = end

    def missing(self, ends: dict[int, int]) -> int:
        rows, num_tokens = np.array([*ends], np.int64), np.array([*ends.values()], np.int64)
        return self.cache.blocks_missing(rows, num_tokens)

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 3), count=counts)
    def confirm(self, index, count) -> None:
        row = self.rows[sorted(self.rows)[index % len(self.rows)]]
        row.confirmed = min(row.confirmed + count, row.computed)

    @rule()
    def publish_all(self) -> None:
        self.publish()

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 3), publishes=st.sampled_from([True, True, False]))
    def end(self, index, publishes) -> None:
        """A row finishes, or is lost without a word."""
        if publishes:
            self.publish()
        at = sorted(self.rows)[index % len(self.rows)]
        others = [i for other in self.rows if other != at for table in self.cache.block_ids(other) for i in table]
        unshared = {int(i) for table in self.cache.block_ids(at) for i in table if i} - {*others}
        num_free = self.cache.num_free_blocks
        assert self.cache.num_unshared_blocks(at) == len(unshared)
        self.free(at)
        assert self.cache.num_free_blocks == num_free + len(unshared)

    @rule()
    def reset(self) -> None:
        assert self.cache.reset_prefix_cache() == (not self.rows)
        if not self.rows:
            self.found = [{} for _ in self.specs]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "cache"):
            rows = self.rows.items()
            self.cache.check({at: row.computed for at, row in rows}, {at: row.confirmed for at, row in rows})
            assert self.cache.num_cached_blocks == sum(map(len, self.found))

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for at in list(self.rows):
                self.cache.free_rows(np.array([at]))
            self.cache.check({}, {})
            assert self.cache.num_free_blocks == self.cache.num_usable_blocks
            assert not self.cache.capacity.any()


CacheMachine.TestCase.settings = settings(max_examples=num_examples(30, 60), stateful_step_count=30, deadline=None)
TestKVCache = CacheMachine.TestCase
