"""What every attention backend must do, against attention written out token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import DTYPE_BYTES, FullAttentionSpec

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


class Bench:
    """A pool full of old numbers, sequences in it, and a backend that is driven step by step."""

    def __init__(
        self, name: str, block_size: int, num_heads: int, num_kv_heads: int, dtype: str, seed: int = 0
    ) -> None:
        self.spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=HEAD_SIZE, dtype=dtype
        )
        self.dtype = getattr(torch, dtype)
        self.num_heads = num_heads
        self.backend: AttentionBackend = choose_backend(name, self.spec, num_heads, CPU)
        self.random = torch.Generator().manual_seed(seed)
        self.order = np.random.default_rng(seed)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def allocate(self, lens: list[int], consecutive: bool) -> None:
        needed = [self.spec.blocks_needed(n) for n in lens]
        ids = np.arange(1, sum(needed) + 1)
        ids = ids if consecutive else self.order.permutation(ids)
        shape = self.backend.kv_cache_shape(sum(needed) + 1)
        assert np.prod(shape) * DTYPE_BYTES[self.spec.dtype] == (sum(needed) + 1) * self.spec.page_size_bytes
        self.cache = self.tensor(*shape) * 50  # what earlier owners left
        ends = np.cumsum(needed)
        none = torch.empty(0, self.spec.num_kv_heads, HEAD_SIZE, dtype=self.dtype)
        self.sequences = [Sequence(ids[e - n : e], none, none) for e, n in zip(ends, needed, strict=True)]

    def step(self, parts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `query_len` new tokens of each (sequence, query_len) -> (the backend's result, the right one)."""
        members = [self.sequences[i] for i, _ in parts]
        lens = [n for _, n in parts]
        q = self.tensor(sum(lens), self.num_heads, HEAD_SIZE)
        k, v = (self.tensor(sum(lens), self.spec.num_kv_heads, HEAD_SIZE) for _ in range(2))
        starts = np.concatenate([[0], np.cumsum(lens)])
        expected, slots = [], []
        for seq, start, n in zip(members, starts, lens, strict=False):
            positions = np.arange(len(seq.keys), len(seq.keys) + n)
            slots.append(seq.blocks[positions // self.spec.block_size] * self.spec.block_size)
            slots[-1] = slots[-1] + positions % self.spec.block_size
            seq.keys = torch.cat((seq.keys, k[start : start + n]))
            seq.values = torch.cat((seq.values, v[start : start + n]))
            expected += [attend(q[start + j], seq.keys[: p + 1], seq.values[: p + 1]) for j, p in enumerate(positions)]
        seq_lens = np.array([len(s.keys) for s in members], dtype=np.int32)
        table = np.zeros((len(members), max(len(s.blocks) for s in members) + 1), dtype=np.int32)
        for row, seq, n in zip(table, members, seq_lens, strict=True):
            used = self.spec.blocks_needed(int(n))
            row[:used] = seq.blocks[:used]
        metadata = AttentionMetadata(
            num_tokens=sum(lens),
            num_seqs=len(members),
            max_query_len=max(lens),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_cpu=starts.astype(np.int32),
            seq_lens_cpu=seq_lens,
            block_table_cpu=table,
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(torch.int64),
        )
        plan = self.backend.plan(metadata)
        got = [self.backend.forward(q, k, v, self.cache, metadata, plan, HEAD_SIZE**-0.5) for _ in range(2)]
        assert torch.equal(got[0], got[1]), "a plan serves every layer of its step"
        return got[0], torch.stack(expected)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token: q [num_heads, head_size], keys and values [n, num_kv_heads, head_size], in float64."""
    group = q.shape[0] // keys.shape[1]
    heads = []
    for h in range(q.shape[0]):
        scores = keys[:, h // group].double() @ q[h].double() * HEAD_SIZE**-0.5
        heads.append(scores.softmax(0) @ values[:, h // group].double())
    return torch.stack(heads)


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
    run_case(Bench(name, block_size, 6, 2, "float32"), case, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (9, 3)])
def test_head_groupings(name: str, heads: tuple[int, int]) -> None:
    run_case(Bench(name, 4, *heads, "float32"), MIXED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("consecutive", [False, True])
def test_half_formats(name: str, dtype: str, consecutive: bool) -> None:
    run_case(Bench(name, 16, 4, 2, dtype), MIXED, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("consecutive", [False, True])
def test_long_contexts_and_chunks_of_several_tiles(name: str, consecutive: bool) -> None:
    run_case(Bench(name, 16, 8, 4, "float32"), LONG, consecutive)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_over_many_steps_among_others(name: str) -> None:
    bench = Bench(name, 4, 4, 2, "float32", seed=3)
    bench.allocate([40, 30, 50, 20], consecutive=False)
    for parts in ([(0, 5)], [(0, 3), (1, 9)], [(2, 17), (0, 1), (1, 1)], [(3, 1), (2, 2)], [(3, 1), (0, 1), (1, 1)]):
        got, expected = bench.step(parts)
        assert (got.double() - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_padding_never_lets_old_numbers_through(name: str) -> None:
    """Two like lengths share a batch; the shorter one's padding is old numbers and the null block."""
    bench = Bench(name, 4, 2, 1, "float32")
    bench.allocate([6, 15], consecutive=False)
    bench.step([(0, 5), (1, 14)])
    bench.cache[bench.cache.abs() > 20] = 1e30
    got, expected = bench.step([(0, 1), (1, 1)])
    assert (got.double() - expected).abs().max() < TOLERANCE["float32"]


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
