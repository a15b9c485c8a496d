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
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.attention.fp8_rows import rounded
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.native.attention_kernels import attention_kernel
from ringcore.kv_cache.spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()
RUNS_ON = dict.fromkeys(("triton", "flash_attn", "triton_mla", "triton_rows"), "cuda") | dict.fromkeys(
    ("cpu_attn", "torch_sdpa", "torch_mla"), "cpu"
)
OF_A_CPU = "torch_sdpa" if attention_kernel() is None else "cpu_attn"  # what "auto" takes: the kernel needs a compiler
HEAD_SIZE = 16
# Of the largest difference: float32 sums of a few hundred terms in another order; the half formats' own rounding of
# inputs, weights and outputs near 1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


def refusal(
    name: str, spec: KVCacheSpec, layer: AttentionSpec, sharing_specs: Iterable[KVCacheSpec] = ()
) -> str | None:
    return BACKENDS[name].refusal(spec, [layer], torch.device(RUNS_ON[name]), list(sharing_specs))


@dataclass
class Sequence:
    """One sequence's keys and values so far, as they were given, and its blocks."""

    blocks: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor
    num_left_behind: int = 0  # blocks that no later token sees


def spec_of(
    block_size: int,
    num_kv_heads: int,
    dtype: str = "float32",
    window: int | None = None,
    head_size: int = HEAD_SIZE,
    *,
    chunk: int | None = None,
    v_head_size: int | None = None,
    is_fp8: bool = False,
) -> KVCacheSpec:
    shape = (block_size, num_kv_heads, head_size, dtype)
    if window is not None:
        return SlidingWindowSpec(*shape, window, v_head_size, is_fp8)
    if chunk is not None:
        return ChunkedAttentionSpec(*shape, chunk, v_head_size, is_fp8)
    return FullAttentionSpec(*shape, v_head_size, is_fp8)


def layer_of(
    num_heads: int, head_size: int = HEAD_SIZE, softcap: float | None = None, sinks: bool = False
) -> AttentionSpec:
    return AttentionSpec(num_heads, head_size**-0.5, softcap, sinks)


def first_seen(spec: KVCacheSpec, positions: torch.Tensor) -> torch.Tensor:
    """Of tokens at `positions`: the first token that each sees."""
    match spec:
        case SlidingWindowSpec():
            return (positions - spec.sliding_window + 1).clamp(min=0)
        case ChunkedAttentionSpec():
            return positions - positions % spec.chunk_size
        case FullAttentionSpec():
            return torch.zeros_like(positions)


class Bench:
    """A pool full of old numbers, sequences in it, and a backend that is driven step by step."""

    def __init__(
        self,
        name: str,
        spec: KVCacheSpec,
        num_heads: int,
        sharing_specs: Iterable[KVCacheSpec] = (),
        seed: int = 0,
        *,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        self.spec, self.sharing_specs = spec, list(sharing_specs)
        self.layer = layer_of(num_heads, spec.head_size, softcap, sinks)
        self.dtype = getattr(torch, spec.dtype)
        self.num_heads = num_heads
        self.is_interpreted = name in ("triton", "triton_rows") and not HAS_GPU
        self.device = CPU if self.is_interpreted else torch.device(RUNS_ON[name])
        if reason := refusal(name, spec, self.layer, self.sharing_specs):
            pytest.skip(f"{name} refuses: {reason}")
        self.backend: AttentionBackend = BACKENDS[name](spec, [self.layer], self.sharing_specs)
        self.random = torch.Generator().manual_seed(seed)
        self.sinks = self.tensor(num_heads) * 3 if sinks else None
        self.told, self.told_sinks = self.layer, self.sinks  # what the backend is told in each call
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
        num_bytes = np.prod(shape) * self.backend.storage_dtype.itemsize
        assert num_bytes == (sum(needed) + 1) * self.spec.page_size_bytes
        if self.spec.is_fp8:  # finite, as what is written always is
            self.cache = torch.randint(127, shape, generator=self.random, dtype=torch.uint8).to(self.device)
        else:
            self.cache = self.tensor(*shape) * 50  # what earlier owners left
        self.place(ids, needed)

    def place(self, ids: np.ndarray, needed: list[int]) -> None:
        ends = np.cumsum(needed)
        none = [self.tensor(0, self.spec.num_kv_heads, n) for n in (self.spec.head_size, self.spec.value_size)]
        self.sequences = [Sequence(ids[e - n : e], *none) for e, n in zip(ends, needed, strict=True)]

    def step(self, parts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `query_len` new tokens of each (sequence, query_len) -> (the backend's result, the right one)."""
        members = [self.sequences[i] for i, _ in parts]
        lens = [n for _, n in parts]
        spec = self.spec
        q = self.tensor(sum(lens), self.num_heads, spec.head_size)
        k, v = (self.tensor(sum(lens), spec.num_kv_heads, size) for size in (spec.head_size, spec.value_size))
        for seq in members:
            self._leave_behind(seq)
        starts = np.concatenate([[0], np.cumsum(lens)])
        expected, slots = [], []
        for seq, start, n in zip(members, starts, lens, strict=False):
            positions = np.arange(len(seq.keys), len(seq.keys) + n)
            slots.append(seq.blocks[positions // self.spec.block_size] * self.spec.block_size)
            slots[-1] = slots[-1] + positions % self.spec.block_size
            new = k[start : start + n], v[start : start + n]
            new = (rounded(new[0]), rounded(new[1])) if spec.is_fp8 else new
            seq.keys, seq.values = torch.cat((seq.keys, new[0])), torch.cat((seq.values, new[1]))
            expected.append(attend(q[start : start + n], seq.keys, seq.values, spec, self.layer, self.sinks))
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
        return self.backend.forward(q, k, v, self.cache, metadata, plan, self.told, self.told_sinks)

    def _write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """First they are made unreadable, so that it shows if they are not."""
        spec = self.spec
        if spec.is_fp8:
            page = PageLayout.of(self.cache, spec.head_size)
            for kind in (*page.split(self.cache), *page.exponents(self.cache)):
                kind[slots // spec.block_size, :, slots % spec.block_size] = 255
            page.write(self.cache, slots, (k, v))
            return
        if spec.v_head_size is None:
            pages = self.cache.view(-1, 2, spec.num_kv_heads, spec.block_size, spec.head_size)
            kinds = list(pages.unbind(1))
        else:  # each key with its value
            both = self.cache.view(-1, spec.num_kv_heads, spec.block_size, spec.head_size + spec.v_head_size)
            kinds = list(both.split([spec.head_size, spec.v_head_size], 3))
        places = (slots // spec.block_size, slice(None), slots % spec.block_size)
        for kind, new in zip(kinds, (k, v), strict=True):
            kind[places] = torch.nan
            kind[places] = new

    def check(self, parts: list[tuple[int, int]]) -> None:
        got, expected = self.step(parts)
        assert got.shape == expected.shape
        assert got.is_contiguous()
        difference = (got.double() - expected).abs().max().item()
        assert difference < TOLERANCE[self.spec.dtype], f"largest difference {difference}"

    def _leave_behind(self, seq: Sequence) -> None:
        """Gives the blocks of which the next token sees nothing to a sequence that is all NaN, or of large numbers:
        reading them shows."""
        gone = int(first_seen(self.spec, torch.tensor(len(seq.keys)))) // self.spec.block_size
        n, spec = self.spec.block_size, self.spec
        nan = self.tensor(n, max(self.num_heads, spec.num_kv_heads), max(spec.head_size, spec.value_size))
        nan *= 1e4 if spec.is_fp8 else torch.nan  # FP8 stores no NaN
        q, k, v = nan[..., : spec.head_size], nan[..., : spec.head_size], nan[..., : spec.value_size]
        q, k, v = (
            x[:, :n].contiguous() for x, n in ((q, self.num_heads), (k, spec.num_kv_heads), (v, spec.num_kv_heads))
        )
        for block in seq.blocks[seq.num_left_behind : gone]:
            metadata = metadata_of([n], np.array([n]), np.array([[block]]), block * n + np.arange(n), self.device)
            self.forward(q, k, v, metadata, self.backend.plan(metadata))
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


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: KVCacheSpec,
    layer: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of a sequence: q [n, num_heads, head_size], keys and values [all, num_kv_heads, ...]. In float64,
    all scores of all tokens, by the definitions alone."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    tokens = torch.arange(len(keys))
    positions = tokens[len(keys) - len(q) :, None]
    is_seen = (first_seen(spec, positions) <= tokens) & (tokens <= positions)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def run_case(bench: Bench, case: list[tuple[int, int]], consecutive: bool = False) -> None:
    bench.allocate([computed + query_len for computed, query_len in case], consecutive)
    history = [(i, computed) for i, (computed, _) in enumerate(case) if computed]
    steps = ([history] if history else []) + [[(i, query_len) for i, (_, query_len) in enumerate(case)]]
    for parts in steps:
        bench.check(parts)
