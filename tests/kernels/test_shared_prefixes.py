"""The groups of sequences that share a prefix, against a search over all prefixes that there are."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.prefix_tiling import MAX_SEQS, UNIT_ROWS, PrefixTiling
from ringcore.kernels.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes

TILE, NUM_KV_HEADS = 64, 2


def tiling_of(block_size: int = 16, **options) -> PrefixTiling:
    defaults = {"group": 20, "v_head_size": 8, "max_spans": 2, "min_lanes": 1, "min_tiles": 2, "min_saved_tiles": 5}
    return PrefixTiling(TILE, block_size, NUM_KV_HEADS, **(defaults | options))


@dataclass
class Row:
    blocks: list[int]
    num_tokens: int


@dataclass
class Cache:
    """Rows whose tables begin with cached blocks, as a prefix cache hands them out: a block is found after those before
    it alone."""

    source: random.Random
    block_size: int
    num_blocks: int = 0
    cached: dict[tuple[int, int], int] = field(default_factory=dict)  # by the block before and the text of this one
    rows: list[Row] = field(default_factory=list)

    def new_block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks

    def admit(self) -> None:
        text, before, blocks = self.source.randrange(1, 3), 0, []
        for place in range(self.source.choice([0, 4, 10, 20, 33])):
            if place in (8, 24) and self.source.random() < 0.5:  # texts part ways
                text = 10 * text + self.source.randrange(2)
            if (before, text) not in self.cached:
                self.cached[before, text] = self.new_block()
            before = self.cached[before, text]
            blocks.append(before)
        own = self.source.randrange(1, 100)
        num_tokens = len(blocks) * self.block_size + own
        blocks += [self.new_block() for _ in range(-(-own // self.block_size))]
        self.rows.append(Row(blocks, num_tokens))

    def change(self) -> None:
        for _ in range(self.source.randrange(4)):
            self.admit()
        for row in self.rows:  # each decodes a token
            row.num_tokens += 1
            if row.num_tokens > len(row.blocks) * self.block_size:
                row.blocks.append(self.new_block())
        if len(self.rows) > 10:  # finished or preempted
            self.rows = self.source.sample(self.rows, len(self.rows) - self.source.randrange(5))

    def batch(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        """With padding, and with stale entries after the last block of a row."""
        width = max(len(row.blocks) for row in self.rows) + 2
        table = torch.full((len(self.rows) + 2, width), 7, dtype=torch.int32)
        lens = torch.zeros(len(self.rows) + 2, dtype=torch.int32)
        for i, row in enumerate(self.rows):
            table[i, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
            lens[i] = row.num_tokens
        return table.to(device), lens.to(device)


def groups_of(shared: SharedPrefixes, tiling: PrefixTiling) -> list[tuple[list[int], int]]:
    """(sequences, tiles) of each, from the units, which must cover every member, KV head and tile once."""
    num_units = int(shared.units[0, 0])
    covered: dict[int, Counter] = {}
    rows = {}
    for kv_head, first, end, leader, tile, end_tile, span, _ in shared.units[1 : 1 + num_units].tolist():
        assert 0 < end - first <= tiling.unit_seqs
        assert tile < end_tile, "a unit without tiles"
        assert span < tiling.max_spans
        here = [(kv_head, member, at) for member in range(first, end) for at in range(tile, end_tile)]
        covered.setdefault(leader, Counter()).update(here)
        rows.setdefault(leader, Counter()).update((kv_head, member, span) for member in range(first, end))
    groups = []
    for leader, tiles in covered.items():
        assert set(tiles.values()) == set(rows[leader].values()) == {1}
        members = sorted({member for _, member, _ in tiles})
        sequences, length = shared.members[members].tolist(), max(at for _, _, at in tiles) + 1
        assert leader in sequences
        assert len(tiles) == NUM_KV_HEADS * len(members) * length
        num_spans = min(tiling.max_spans, length // 2)
        assert len(rows[leader]) == NUM_KV_HEADS * len(members) * num_spans
        assert set((shared.words[sequences] >> 24).tolist()) == {num_spans}
        groups.append((sequences, length))
    return groups


def most_saved(rows: list[Row | None], tiling: PrefixTiling) -> int:
    """By any prefix: (sequences that have it - 1) * its tiles."""
    blocks, step = tiling.granule_tokens // tiling.block_size, tiling.granule_tokens // TILE
    count = Counter(
        tuple(row.blocks[: granule * blocks])
        for row in rows
        if row is not None
        for granule in range(-(-tiling.min_tiles // step), (row.num_tokens - 1) // tiling.granule_tokens + 1)
    )
    found = [(n - 1, len(prefix) // blocks * step) for prefix, n in count.items()]
    wide = [
        (others, tiles) for others, tiles in found if others * min(tiling.max_spans, tiles // 2) >= tiling.min_lanes
    ]
    return max((others * tiles for others, tiles in wide), default=0)


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_rows_that_come_grow_and_go(device, block_size):
    cache = Cache(random.Random(block_size), block_size)
    tiling = tiling_of(block_size, min_lanes=3 if block_size == 48 else 1)
    cache.admit()
    sizes = Counter()
    for _ in range(14):
        cache.change()
        table, lens = cache.batch(device)
        shared = find_shared_prefixes(table, lens, tiling)
        left: list[Row | None] = [*cache.rows]
        for sequences, tiles in groups_of(shared, tiling):
            group = [cache.rows[sequence] for sequence in sequences]
            assert tiles * TILE % tiling.granule_tokens == 0
            assert all(row.num_tokens > tiles * TILE for row in group), "a sequence has a token of its own"
            assert len({tuple(row.blocks[: tiles * TILE // block_size]) for row in group}) == 1
            assert (len(group) - 1) * tiles >= tiling.min_saved_tiles
            assert None in left or (len(group) - 1) * tiles == most_saved(left, tiling), "another saves more"
            assert shared.tiles[sequences].tolist() == [tiles] * len(group)
            for sequence in sequences:
                assert left[sequence] is not None, "a sequence in two groups"
                left[sequence] = None
        assert most_saved(left, tiling) < tiling.min_saved_tiles, "a group is missing"
        alone = [i for i, row in enumerate(left) if row is not None]
        assert shared.tiles[[*alone, len(left), len(left) + 1]].tolist() == [0] * (len(alone) + 2)
        sizes[len(left) - len(alone)] += 1
    assert len(sizes) > 3, "the rows are too much alike"


def test_one_sequence_that_shares_less_shortens_no_group(device):
    """Nor does it lead one."""
    shared = list(range(1, 41))
    rows = [shared[:8] + [50 + i for i in range(33)]] + [[*shared, 100 + i] for i in range(5)]
    lens = torch.full((6,), 640 + 10, dtype=torch.int32, device=device)
    found = find_shared_prefixes(torch.tensor(rows, dtype=torch.int32, device=device), lens, tiling_of())
    assert found.tiles.tolist() == [0, 10, 10, 10, 10, 10]


def test_the_last_token_is_a_sequence_s_own(device):
    """Of a prompt that is cached as a whole, whose last token is computed again."""
    table = torch.arange(1, 13, dtype=torch.int32, device=device).repeat(8, 1)
    lens = torch.tensor([192, 193, 192, 193, 129, 128, 0, 1], dtype=torch.int32, device=device)
    assert find_shared_prefixes(table, lens, tiling_of()).tiles.tolist() == [2, 2, 2, 2, 2, 0, 0, 0]


def test_nothing_shared_is_no_unit(device):
    table = torch.arange(8 * 12, dtype=torch.int32, device=device).view(8, 12)
    found = find_shared_prefixes(table, torch.full((8,), 190, dtype=torch.int32, device=device), tiling_of())
    assert not found.tiles.any()
    assert found.units[0, 0] == 0


def choose(num_seqs: int, dtype=torch.bfloat16, heads=(32, 8, 128), **options) -> PrefixTiling | None:
    tiling = DecodeTiling.choose(num_seqs, heads[2], dtype)
    scheduler = DecodeTileScheduler.allocate(*heads, tiling, torch.device("cpu"), num_programs=264, **options)
    return PrefixTiling.choose(scheduler, num_seqs, 16, dtype)


def test_prefixes_are_cut_to_as_many_units_as_programs():
    assert [choose(n).max_spans for n in (8, 64, 128, 256, 1024)] == [8, 8, 4, 2, 1]
    tiling = choose(256)
    assert tiling.unit_seqs * tiling.group == UNIT_ROWS.value
    assert tiling.min_saved_tiles == (97 - 1) * 16  # 97 sequences and 1,024 tokens are the least
    assert choose(256, heads=(40, 8, 128)).unit_seqs == 12
    assert choose(256).min_lanes == 33, "each of 264 programs has a tile less to read"


def test_what_reads_its_prefixes_by_itself():
    assert choose(7) is None, "too few to compare"
    assert choose(MAX_SEQS + 1) is None
    assert choose(64, window=512) is None
    assert choose(64, chunk=512) is None
    assert choose(64, torch.uint8) is None
    assert choose(64, torch.float32) is None
    assert choose(64, heads=(8, 1, 256)) is None
    assert choose(64, heads=(71, 1, 64)) is None
