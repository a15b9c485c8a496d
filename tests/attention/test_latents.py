"""Backends of latents against attention with expanded heads, sequence by sequence, in float32."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

import interpreted_triton  # noqa: F401, before the kernels
import numpy as np
import pytest
import torch
from attention_bench import OF_A_CPU

from ringcore.attention.backend import LatentBackend
from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.layer import LatentAttention
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.checkpoint.matrix_tensors import DENSE
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, MLASpec
from ringcore.model_executor.layers.latent_heads import LatentHeads
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.shard import OutputSlice

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HAS_GPU = torch.cuda.is_available()
BLOCK = {"torch_mla": 4, "triton_mla": 16}
NAMES = [name for name in BLOCK if name != "triton_mla" or importlib.util.find_spec("triton")]
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}

# (tokens before, new tokens) of each sequence of a step
DECODES = [(4, 1), (17, 1), (0, 1), (63, 1), (16, 1)]
EQUAL_DECODES = [(12, 1)] * 3
PROMPTS = [(0, 7), (0, 7), (0, 16), (0, 33), (0, 2)]
CHUNKS = [(16, 16), (5, 9), (64, 3), (1, 30)]
MIXED = [(40, 1), (3, 1), (0, 5), (16, 11), (48, 2), (7, 40)]


@dataclass
class Shape:
    num_heads: int = 3
    rank: int = 16
    rope: int = 8
    nope: int = 8
    v: int = 8
    dtype: str = "float32"

    def spec(self, block_size: int) -> MLASpec:
        return MLASpec(block_size, self.rank, self.rope, self.dtype)


@dataclass
class Sequence:
    rows: torch.Tensor
    blocks: np.ndarray


@dataclass
class Bench:
    """A pool of pages full of old numbers, sequences in it, and a backend that is driven step by step."""

    name: str
    shape: Shape
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        shape = self.shape
        self.device = CUDA if self.name == "triton_mla" and HAS_GPU else CPU
        self.spec = shape.spec(BLOCK[self.name])
        self.layer = LatentAttention(
            5, shape.num_heads, shape.rank, shape.rope, shape.nope, shape.v, scale=(shape.nope + shape.rope) ** -0.5
        )
        self.backend = BACKENDS[self.name](self.spec, [self.layer.spec])
        assert isinstance(self.backend, LatentBackend)
        num_outputs = shape.num_heads * (shape.nope + shape.v)
        output = OutputSlice("kv_b", num_outputs, 0, num_outputs)
        dtype = getattr(torch, shape.dtype)
        self.up = LatentHeads("up", [output], shape.rank, shape.nope, shape.v, dtype, all_dense)
        self.matrix = self.tensor(num_outputs, shape.rank) / shape.rank**0.5
        self.up.bind({f"up.{DENSE[0].suffix}": self.matrix.clone()})

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, getattr(torch, self.shape.dtype))

    def start(self, parts: list[tuple[int, int]], consecutive: bool) -> None:
        """Sequences with their first tokens in the cache."""
        size = self.spec.block_size
        needed = [-(-(sum(part) + 1) // size) for part in parts]  # of one more step too
        ids = np.arange(1, sum(needed) + 1, dtype=np.int32)
        ids = ids if consecutive else np.random.default_rng(0).permutation(ids)
        self.cache = self.tensor(*self.backend.kv_cache_shape(len(ids) + 1)) * 50
        ends = np.cumsum(needed)
        blocks = [ids[end - n : end] for end, n in zip(ends, needed, strict=True)]
        self.sequences = [
            Sequence(self.tensor(before, self.spec.head_size), own)
            for (before, _), own in zip(parts, blocks, strict=True)
        ]
        for sequence in self.sequences:
            self.write(sequence.rows, self.slots(sequence, 0, len(sequence.rows)))

    def slots(self, sequence: Sequence, first: int, end: int) -> torch.Tensor:
        places, size = np.arange(first, end), self.spec.block_size
        return torch.from_numpy(sequence.blocks[places // size].astype(np.int64) * size + places % size)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self.cache.flatten(0, 1)[slots.to(self.device)] = rows

    def metadata(self, lens: list[int]) -> AttentionMetadata:
        """Of a step of `lens` new tokens."""
        totals = [len(sequence.rows) for sequence in self.sequences]
        table = np.zeros((len(lens), max(len(sequence.blocks) for sequence in self.sequences)), np.int32)
        for row, sequence in zip(table, self.sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        slots = [self.slots(one, n - new, n) for one, n, new in zip(self.sequences, totals, lens, strict=True)]
        num_decodes = next((i for i, n in enumerate(lens) if n != 1), len(lens))
        return AttentionMetadata(
            *(sum(lens), len(lens), max(lens), max(totals)),
            np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
            np.array(totals, np.int32),
            table,
            torch.cat(slots).to(self.device),
            num_decodes,
        )

    def step(self, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the backend's result, the right one) of a step of so many new tokens."""
        new = [self.tensor(n, self.spec.head_size) for n in lens]
        for sequence, rows in zip(self.sequences, new, strict=True):
            sequence.rows = torch.cat((sequence.rows, rows))
        rows, metadata = torch.cat(new), self.metadata(lens)
        query = self.tensor(len(rows), self.shape.num_heads, self.shape.nope + self.shape.rope)
        group = GroupContext.of(metadata, self.backend)
        ctx = ForwardContext((group,), {5: 0}, {5: self.cache})
        if (target := self.layer.kv_write_target(ctx)) is not None:
            target.kv_cache.flatten(0, 1)[target.slot_mapping] = rows
        return self.layer(query, rows, self.up, ctx), self.right(query, lens)

    def right(self, query: torch.Tensor, lens: list[int]) -> torch.Tensor:
        shape, results = self.shape, []
        matrix = self.matrix.float().view(shape.num_heads, shape.nope + shape.v, shape.rank)
        for sequence, q in zip(self.sequences, query.float().split(lens), strict=True):
            latents, shared = sequence.rows.float().split((shape.rank, shape.rope), 1)
            keys, values = torch.einsum("tr,hor->hto", latents, matrix).split((shape.nope, shape.v), 2)
            keys = torch.cat((keys, shared.expand(shape.num_heads, -1, -1)), 2)
            scores = torch.einsum("qhd,hkd->hqk", q, keys) * self.layer.scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            scores.masked_fill_(later.triu(1 + len(latents) - len(q)), -torch.inf)
            results.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values))
        return torch.cat(results)


def check(name: str, parts: list[tuple[int, int]], shape: Shape | None = None, consecutive: bool = False) -> None:
    bench = Bench(name, shape or Shape())
    bench.start(parts, consecutive)
    lens = [new for _, new in parts]
    for again in (lens, [1] * len(lens)):  # what a step has written, the next one reads
        ours, right = bench.step(again)
        assert ours.shape == right.shape
        assert (ours.float() - right).abs().max() <= TOLERANCE[bench.shape.dtype]


@pytest.mark.parametrize("consecutive", [False, True], ids=["scattered", "consecutive"])
@pytest.mark.parametrize("parts", [DECODES, EQUAL_DECODES, PROMPTS, CHUNKS, MIXED])
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_step(name, parts, consecutive):
    """Of these sizes a chunk is expanded from 17 tokens on."""
    assert Bench(name, Shape()).backend.expands_from(Bench(name, Shape()).up) == 17
    check(name, parts, consecutive=consecutive)


@pytest.mark.parametrize(
    "shape", [Shape(rank=12, rope=4, nope=20, v=6), Shape(1, 32, 16, 16, 24), Shape(5, 24, 2, 2, 2)]
)
@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, shape):
    check(name, MIXED, shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    check("torch_mla", MIXED, Shape(dtype=dtype))


@pytest.mark.parametrize("parts", [[(300, 270)], [(700, 1), (900, 1), (0, 300)]])
def test_long_sequences(parts):
    """More rows than a tile; contexts that are read in place."""
    check("torch_mla", parts, consecutive=True)


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_expanded_a_few_at_a_time(name, monkeypatch):
    """Of two heads together the numbers of 40 tokens are too many."""
    import sys

    module = sys.modules[BACKENDS[name].__module__]
    monkeypatch.setattr(module, "_MAX_EXPANDED", 40 * 24 * 2 - 1)
    if name == "triton_mla":
        monkeypatch.setattr(module, "_MAX_GATHERED", 16)  # rows of a block at a time
    check(name, [(7, 33), (0, 40)])


def test_a_weight_update_reaches_both_forms():
    bench = Bench("torch_mla", Shape())
    tensor = bench.matrix.clone()
    bench.up.bind({"up.weight": tensor}, updatable=True)
    bench.matrix = bench.matrix * -0.5
    tensor.copy_(bench.matrix)
    bench.up.refresh()
    bench.start(MIXED, consecutive=False)
    ours, right = bench.step([new for _, new in MIXED])
    assert (ours - right).abs().max() <= TOLERANCE["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_numbers_that_are_not_finite_are_zeroed(name):
    bench = Bench(name, Shape())
    bench.start([(3, 2)], consecutive=False)
    bench.step([2])
    bench.layer.zero_kv(GroupContext.of(bench.metadata([2]), bench.backend), bench.cache)
    (sequence,) = bench.sequences
    kept, zeroed = (bench.cache.flatten(0, 1)[bench.slots(sequence, *ends)] for ends in ((0, 3), (3, 5)))
    assert torch.equal(kept, sequence.rows[:3])
    assert not zeroed.any()


PLAIN = AttentionSpec(4, 1.0)


def test_the_choice_of_a_backend_is_by_the_cache():
    latents, heads = Shape().spec(16), FullAttentionSpec(16, 1, 16, "float32")
    assert choose_backend("auto", latents, [PLAIN], CPU).name == "torch_mla"
    assert choose_backend("auto", heads, [PLAIN], CPU).name == OF_A_CPU
    with pytest.raises(ConfigError, match="torch_sdpa: it attends over keys and values of heads, not over latents"):
        choose_backend("torch_sdpa", latents, [PLAIN], CPU)
    with pytest.raises(ConfigError, match="torch_mla: it attends over latents, not over keys and values of heads"):
        choose_backend("torch_mla", heads, [PLAIN], CPU)
    with pytest.raises(ConfigError, match="torch_mla: it has neither softcap nor sinks"):
        choose_backend("torch_mla", latents, [AttentionSpec(4, 1.0, softcap=2.0)], CPU)


@pytest.mark.parametrize("other", [FullAttentionSpec(4, 1, 12, "float32"), FullAttentionSpec(16, 3, 12, "float32")])
def test_on_a_cpu_latents_do_not_share_memory_with_heads(other: KVCacheSpec):
    """There the keys of all blocks lie before all values."""
    latents = Shape().spec(4)
    with pytest.raises(ConfigError, match="layers that share its memory have keys and values of heads"):
        choose_backend("torch_mla", latents, [PLAIN], CPU, sharing_specs=[other])
    with pytest.raises(ConfigError, match="layers that share its memory have other shares of keys and values"):
        choose_backend("torch_sdpa", other, [AttentionSpec(3, 1.0)], CPU, sharing_specs=[latents])
    assert choose_backend("torch_mla", latents, [PLAIN], CPU, sharing_specs=[latents]).name == "torch_mla"
