"""A pool of pages and sequences in it, over which a backend is driven step by step and compared with attention over
whole sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import BACKENDS
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import DTYPE_BYTES, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()
RUNS_ON = {"triton": "cuda", "flash_attn": "cuda", "torch_sdpa": "cpu"}
HEAD_SIZE = 16
# Of the largest difference: float32 sums of a few hundred terms in another order; the half formats' own rounding of
# inputs, weights and outputs near 1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


def refusal(name: str, spec: KVCacheSpec) -> str | None:
    return BACKENDS[name].refusal(spec, torch.device(RUNS_ON[name]))


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
        self, name: str, spec: KVCacheSpec, num_heads: int, sharing_specs: Iterable[KVCacheSpec] = (), seed: int = 0
    ) -> None:
        self.spec = spec
        self.window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 10**9
        self.dtype = getattr(torch, spec.dtype)
        self.num_heads = num_heads
        self.is_interpreted = name == "triton" and not HAS_GPU
        self.device = CPU if self.is_interpreted else torch.device(RUNS_ON[name])
        if reason := refusal(name, spec):
            pytest.skip(f"{name} refuses: {reason}")
        self.backend: AttentionBackend = BACKENDS[name](spec, num_heads, list(sharing_specs))
        self.random = torch.Generator().manual_seed(seed)
        self.order = np.random.default_rng(seed)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

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
        none = self.tensor(0, self.spec.num_kv_heads, self.spec.head_size)
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
        metadata = metadata_of(lens, seq_lens, table, np.concatenate(slots), self.device)
        plan = self.plan(metadata)
        got = [self.forward(q, k, v, metadata, plan) for _ in range(2)]
        assert torch.equal(got[0], got[1]), "a plan serves every layer of its step"
        if self.backend.accepts_prewritten_kv:
            self._write(k, v, metadata.slot_mapping)
            assert torch.equal(got[0], self.forward(q, None, None, metadata, plan)), (
                "it does not matter who wrote the keys and values"
            )
        return got[0], torch.cat(expected)

    def plan(self, metadata: AttentionMetadata) -> object:
        return self.backend.plan(metadata)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        plan: object,
    ) -> torch.Tensor:
        return self.backend.forward(q, k, v, self.cache, metadata, plan, self.spec.head_size**-0.5)

    def _write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """First they are made unreadable, so that it shows if they are not."""
        spec = self.spec
        pages = self.cache.view(-1, 2, spec.num_kv_heads, spec.block_size, spec.head_size)
        places = (slots // spec.block_size, slice(None), slice(None), slots % spec.block_size)
        pages[places] = torch.nan
        pages[places] = torch.stack((k, v), 1)

    def check(self, parts: list[tuple[int, int]]) -> None:
        got, expected = self.step(parts)
        assert got.shape == expected.shape
        assert got.is_contiguous()
        difference = (got.double() - expected).abs().max().item()
        assert difference < TOLERANCE[self.spec.dtype], f"largest difference {difference}"

    def _leave_behind(self, seq: Sequence) -> None:
        """Gives the blocks of which the next token sees nothing to a sequence that is all NaN: reading them shows."""
        gone = max(0, len(seq.keys) - self.window + 1) // self.spec.block_size
        n, spec = self.spec.block_size, self.spec
        nan = self.tensor(n, max(self.num_heads, spec.num_kv_heads), spec.head_size) * torch.nan
        for block in seq.blocks[seq.num_left_behind : gone]:
            metadata = metadata_of([n], np.array([n]), np.array([[block]]), block * n + np.arange(n), self.device)
            plan, kv = self.backend.plan(metadata), nan[:, : spec.num_kv_heads]
            self.backend.forward(nan[:, : self.num_heads], kv, kv, self.cache, metadata, plan, 1.0)
        seq.num_left_behind = gone


def metadata_of(
    query_lens: list[int], seq_lens: np.ndarray, block_table: np.ndarray, slots: np.ndarray, device: torch.device
) -> AttentionMetadata:
    return AttentionMetadata(
        num_tokens=sum(query_lens),
        num_seqs=len(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_cpu=np.cumsum([0, *query_lens]).astype(np.int32),
        num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens)),
        seq_lens_cpu=seq_lens.astype(np.int32),
        block_table_cpu=block_table.astype(np.int32),
        slot_mapping=torch.from_numpy(slots).to(device, torch.int64),
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """The last tokens of a sequence: q [n, num_heads, head_size], keys and values [all, num_kv_heads, head_size]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))  # from query to key
    scores.masked_fill_(((distance < 0) | (distance >= window)).to(q.device), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def run_case(bench: Bench, case: list[tuple[int, int]], consecutive: bool = False) -> None:
    bench.allocate([computed + query_len for computed, query_len in case], consecutive)
    history = [(i, computed) for i, (computed, _) in enumerate(case) if computed]
    steps = ([history] if history else []) + [[(i, query_len) for i, (_, query_len) in enumerate(case)]]
    for parts in steps:
        bench.check(parts)
