"""What every attention backend must do, against attention over whole sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import DTYPE_BYTES, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

CPU = torch.device("cpu")
HEAD_SIZE = 16
# Of the largest difference: float32 sums of a few hundred terms in another order; the half formats' own rounding of
# inputs, weights and outputs near 1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}

DECODE = [(4, 1), (17, 1), (1, 1), (63, 1), (16, 1)]
EQUAL_DECODE = [(12, 1), (12, 1), (12, 1)]
PROMPTS = [(0, 7), (0, 7), (0, 16), (0, 33), (0, 2), (0, 1)]
CHUNKS = [(16, 16), (5, 9), (64, 3), (1, 30)]
MIXED = [(40, 1), (0, 5), (0, 5), (16, 11), (3, 1), (0, 1), (100, 1), (48, 2)]
LONG = [(700, 1), (300, 290), (900, 1), (20, 1)]


@dataclass
class Sequence:
    """One sequence's keys and values so far, as they were given, and its blocks."""

    blocks: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor
    num_left_behind: int = 0  # blocks that no later token sees


def spec_of(
    block_size: int, num_kv_heads: int, dtype: str = "float32", window: int | None = None, head_size: int = HEAD_SIZE
) -> KVCacheSpec:
    if window is None:
        return FullAttentionSpec(block_size, num_kv_heads, head_size, dtype)
    return SlidingWindowSpec(block_size, num_kv_heads, head_size, dtype, window)


class Bench:
    """A pool full of old numbers, sequences in it, and a backend that is driven step by step."""

    def __init__(
        self, name: str, spec: KVCacheSpec, num_heads: int, neighbours: Iterable[KVCacheSpec] = (), seed: int = 0
    ) -> None:
        self.spec = spec
        self.window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 10**9
        self.dtype = getattr(torch, spec.dtype)
        self.num_heads = num_heads
        self.backend: AttentionBackend = choose_backend(name, spec, num_heads, CPU, neighbours=list(neighbours))
        self.random = torch.Generator().manual_seed(seed)
        self.order = np.random.default_rng(seed)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def allocate(self, lens: list[int], consecutive: bool) -> None:
        needed = [self.num_blocks(n) for n in lens]
        ids = np.arange(1, sum(needed) + 1)
        ids = ids if consecutive else self.order.permutation(ids)
        shape = self.backend.kv_cache_shape(sum(needed) + 1)
        assert np.prod(shape) * DTYPE_BYTES[self.spec.dtype] == (sum(needed) + 1) * self.spec.page_size_bytes
        self.cache = self.tensor(*shape) * 50  # what earlier owners left
        self.place(ids, needed)

    def place(self, ids: np.ndarray, needed: list[int]) -> None:
        ends = np.cumsum(needed)
        none = torch.empty(0, self.spec.num_kv_heads, self.spec.head_size, dtype=self.dtype)
        self.sequences = [Sequence(ids[e - n : e], none, none) for e, n in zip(ends, needed, strict=True)]

    def step(self, parts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `query_len` new tokens of each (sequence, query_len) -> (the backend's result, the right one)."""
        members = [self.sequences[i] for i, _ in parts]
        lens = [n for _, n in parts]
        head_size = self.spec.head_size
        q = self.tensor(sum(lens), self.num_heads, head_size)
        k, v = (self.tensor(sum(lens), self.spec.num_kv_heads, head_size) for _ in range(2))
        for seq in members:
            self._leave_behind(seq)
        starts = np.concatenate([[0], np.cumsum(lens)])
        expected, slots = [], []
        for seq, start, n in zip(members, starts, lens, strict=False):
            positions = np.arange(len(seq.keys), len(seq.keys) + n)
            slots.append(seq.blocks[positions // self.spec.block_size] * self.spec.block_size)
            slots[-1] = slots[-1] + positions % self.spec.block_size
            seq.keys = torch.cat((seq.keys, k[start : start + n]))
            seq.values = torch.cat((seq.values, v[start : start + n]))
            expected.append(attend(q[start : start + n], seq.keys, seq.values, self.window))
        seq_lens = np.array([len(s.keys) for s in members], dtype=np.int32)
        table = np.zeros((len(members), max(len(s.blocks) for s in members) + 1), dtype=np.int32)
        for row, seq, n in zip(table, members, seq_lens, strict=True):
            used = self.num_blocks(int(n))
            row[:used] = seq.blocks[:used]
            row[: seq.num_left_behind : 2] = 0  # the others keep the id, whose block is another's now
        metadata = metadata_of(lens, seq_lens, table, np.concatenate(slots))
        plan = self.backend.plan(metadata)
        got = [self.backend.forward(q, k, v, self.cache, metadata, plan, head_size**-0.5) for _ in range(2)]
        assert torch.equal(got[0], got[1]), "a plan serves every layer of its step"
        return got[0], torch.cat(expected)

    def _leave_behind(self, seq: Sequence) -> None:
        """Gives the blocks of which the next token sees nothing to a sequence that is all NaN: reading them shows."""
        gone = max(0, len(seq.keys) - self.window + 1) // self.spec.block_size
        n, spec = self.spec.block_size, self.spec
        nan = torch.full((n, max(self.num_heads, spec.num_kv_heads), spec.head_size), torch.nan, dtype=self.dtype)
        for block in seq.blocks[seq.num_left_behind : gone]:
            metadata = metadata_of([n], np.array([n]), np.array([[block]]), block * n + np.arange(n))
            plan, kv = self.backend.plan(metadata), nan[:, : spec.num_kv_heads]
            self.backend.forward(nan[:, : self.num_heads], kv, kv, self.cache, metadata, plan, 1.0)
        seq.num_left_behind = gone


def metadata_of(
    query_lens: list[int], seq_lens: np.ndarray, block_table: np.ndarray, slots: np.ndarray
) -> AttentionMetadata:
    return AttentionMetadata(
        num_tokens=sum(query_lens),
        num_seqs=len(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_cpu=np.cumsum([0, *query_lens]).astype(np.int32),
        seq_lens_cpu=seq_lens.astype(np.int32),
        block_table_cpu=block_table.astype(np.int32),
        slot_mapping=torch.from_numpy(slots).to(torch.int64),
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """The last tokens of a sequence: q [n, num_heads, head_size], keys and values [all, num_kv_heads, head_size]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))  # how far a key is behind
    scores.masked_fill_((behind < 0) | (behind >= window), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def run_case(bench: Bench, case: list[tuple[int, int]], consecutive: bool = False) -> None:
    bench.allocate([computed + query_len for computed, query_len in case], consecutive)
    history = [(i, computed) for i, (computed, _) in enumerate(case) if computed]
    steps = ([history] if history else []) + [[(i, query_len) for i, (_, query_len) in enumerate(case)]]
    for parts in steps:
        got, expected = bench.step(parts)
        assert got.shape == expected.shape
        assert got.is_contiguous()
        difference = (got.double() - expected).abs().max().item()
        assert difference < TOLERANCE[bench.spec.dtype], f"largest difference {difference}"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", [DECODE, EQUAL_DECODE, PROMPTS, CHUNKS, MIXED], ids="DEPCM")
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("consecutive", [False, True])
def test_every_kind_of_step(name: str, case: list[tuple[int, int]], block_size: int, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(block_size, 2), 6), case, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize("window", [None, 7])
def test_head_groupings(name: str, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    run_case(Bench(name, spec_of(4, num_kv_heads, window=window), num_heads), MIXED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("consecutive", [False, True])
def test_half_formats(name: str, dtype: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(16, 2, dtype), 4), MIXED, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("consecutive", [False, True])
def test_long_contexts_and_chunks_of_several_tiles(name: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(16, 4), 8), LONG, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_over_many_steps_among_others(name: str) -> None:
    bench = Bench(name, spec_of(4, 2), 4, seed=3)
    bench.allocate([40, 30, 50, 20], consecutive=False)
    for parts in ([(0, 5)], [(0, 3), (1, 9)], [(2, 17), (0, 1), (1, 1)], [(3, 1), (2, 2)], [(3, 1), (0, 1), (1, 1)]):
        got, expected = bench.step(parts)
        assert (got.double() - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_padding_never_lets_old_numbers_through(name: str) -> None:
    """Two like lengths share a batch; the shorter one's padding is old numbers and the null block."""
    bench = Bench(name, spec_of(4, 1), 2)
    bench.allocate([6, 15], consecutive=False)
    bench.step([(0, 5), (1, 14)])
    bench.cache[bench.cache.abs() > 20] = 1e30
    got, expected = bench.step([(0, 1), (1, 1)])
    assert (got.double() - expected).abs().max() < TOLERANCE["float32"]


# Sliding windows. In every step, blocks that a window has left behind hold NaN, and their places ids or zeros.


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", [DECODE, EQUAL_DECODE, PROMPTS, CHUNKS, MIXED], ids="DEPCM")
@pytest.mark.parametrize(("block_size", "window"), [(1, 5), (4, 1), (4, 3), (4, 4), (4, 5), (4, 18), (16, 9), (16, 33)])
@pytest.mark.parametrize("consecutive", [False, True])
def test_windows_smaller_and_larger_than_a_block(
    name: str, case: list[tuple[int, int]], block_size: int, window: int, consecutive: bool
) -> None:
    run_case(Bench(name, spec_of(block_size, 2, window=window), 6), case, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [6, 16])
def test_windows_of_half_formats(name: str, dtype: str, window: int) -> None:
    run_case(Bench(name, spec_of(4, 2, dtype, window), 4), MIXED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_256(name: str, window: int | None, dtype: str) -> None:
    run_case(Bench(name, spec_of(16, 1, dtype, window, head_size=256), 4), MIXED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [40, 256, 500, 800])
@pytest.mark.parametrize("consecutive", [False, True])
def test_windows_over_chunks_and_prompts_of_several_tiles(name: str, window: int, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(16, 2, window=window), 4), LONG, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [1, 4, 6, 9])
@pytest.mark.parametrize("chunks", [[1] * 40, [4] * 10, [5, 3, 8, 1, 1, 7, 15], [13, 1, 26], [40]])
def test_a_window_over_chunks_of_any_length(name: str, window: int, chunks: list[int]) -> None:
    """Beside it a sequence that decodes, and whose window moves on too."""
    bench = Bench(name, spec_of(4, 2, window=window), 4, seed=5)
    bench.allocate([40, 60], consecutive=False)
    bench.step([(1, 11)])
    for chunk in chunks:
        got, expected = bench.step([(0, chunk), (1, 1)])
        assert (got.double() - expected).abs().max() < TOLERANCE["float32"]


# Layers of other shapes in the same memory.


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (spec_of(4, 4), spec_of(8, 2, window=10)),  # two heads beside one
        (spec_of(4, 3), spec_of(6, 2)),  # no common part but 1
        (spec_of(8, 2), spec_of(4, 2, head_size=32)),
        (spec_of(16, 1, window=9), spec_of(4, 4, window=30)),
        (spec_of(4, 2, "bfloat16", head_size=32), spec_of(16, 1, "bfloat16", window=7)),
    ],
)
def test_shapes_that_share_memory_leave_each_others_blocks_alone(
    name: str, one: KVCacheSpec, other: KVCacheSpec
) -> None:
    """The even blocks are the one's, the odd ones the other's."""
    benches = [Bench(name, one, 12, [other]), Bench(name, other, 12, [one], seed=1)]
    pool = benches[0].tensor(*benches[0].backend.kv_cache_shape(61))
    for bench, ids in zip(benches, (np.arange(2, 61, 2), np.arange(1, 61, 2)), strict=True):
        bench.cache = pool.view(bench.backend.kv_cache_shape(61))
        bench.place(bench.order.permutation(ids), [bench.num_blocks(n) for n in (40, 30)])
    for parts in ([(0, 7)], [(1, 20), (0, 1)], [(0, 12), (1, 1)], *[[(1, 1), (0, 1)]] * 9, [(0, 11)]):
        for bench in benches:
            got, expected = bench.step(parts)
            assert (got.double() - expected).abs().max() < TOLERANCE[bench.spec.dtype]


def test_auto_takes_a_backend_that_does_not_refuse() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    assert choose_backend("auto", spec, 4, CPU).name == "torch_sdpa"


def test_every_refusal_is_reported() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    with pytest.raises(ConfigError, match="torch_sdpa: it runs on a CPU, not on meta"):
        choose_backend("auto", spec, 4, torch.device("meta"))
    with pytest.raises(ConfigError, match="no such backend") as unknown:
        choose_backend("flash", spec, 4, CPU)
    assert unknown.value.details == {"option": "attention_backend", "value": "flash"}
    with pytest.raises(ConfigError, match="3 query heads are no multiple of 2 KV heads"):
        choose_backend("torch_sdpa", spec, 3, CPU)
