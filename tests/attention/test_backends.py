"""What every attention backend must do, against attention over whole sequences.

Each runs on the device that it is for. Where there is no GPU, "triton" runs in Triton's interpreter, on the CPU: that
takes seconds a case, so there it has the few that `matrix` is given for it; tests/kernels has more of the kernels.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import DTYPE_BYTES, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()
RUNS_ON = {"triton": "cuda", "flash_attn": "cuda", "torch_sdpa": "cpu"}
HEAD_SIZE = 16
# The smallest blocks that each takes.
SMALL = {"triton": 16, "flash_attn": 16, "torch_sdpa": 4}
# Of the largest difference: float32 sums of a few hundred terms in another order; the half formats' own rounding of
# inputs, weights and outputs near 1.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}

DECODE = [(4, 1), (17, 1), (1, 1), (63, 1), (16, 1)]
EQUAL_DECODE = [(12, 1), (12, 1), (12, 1)]
PROMPTS = [(0, 7), (0, 7), (0, 16), (0, 33), (0, 2), (0, 1)]
CHUNKS = [(16, 16), (5, 9), (64, 3), (1, 30)]
MIXED = [(40, 1), (0, 5), (0, 5), (16, 11), (3, 1), (0, 1), (100, 1), (48, 2)]
LONG = [(700, 1), (300, 290), (900, 1), (20, 1)]
LONG_INTERPRETED = [(70, 1), (30, 60), (5, 1)]


def is_here(name: str) -> bool:
    """Whether the backend can run on this machine, on its own device or interpreted."""
    if name == "triton":
        return importlib.util.find_spec("triton") is not None
    return refusal(name, FullAttentionSpec(256, 1, 64, "float16")) is None


def refusal(name: str, spec: KVCacheSpec) -> str | None:
    return BACKENDS[name].refusal(spec, torch.device(RUNS_ON[name]))


NAMES = [name for name in BACKENDS if is_here(name)]


def matrix(values: Mapping[str, Iterable[Any]], interpreted: Iterable[Any]) -> list[Any]:
    """(name, *value) for all `values` of each backend that is here; without a GPU "triton" has `interpreted` alone."""
    return [
        (name, *(value if isinstance(value, tuple) else (value,)))
        for name in NAMES
        for value in (interpreted if name == "triton" and not HAS_GPU else values[name])
    ]


def product(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*axes))


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
        self.is_interpreted = name == "triton" and not HAS_GPU
        self.device = CPU if self.is_interpreted else torch.device(RUNS_ON[name])
        if reason := refusal(name, spec):
            pytest.skip(f"{name} refuses: {reason}")
        self.backend: AttentionBackend = BACKENDS[name](spec, num_heads, list(neighbours))
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
        plan = self.backend.plan(metadata)
        got = [self.backend.forward(q, k, v, self.cache, metadata, plan, head_size**-0.5) for _ in range(2)]
        assert torch.equal(got[0], got[1]), "a plan serves every layer of its step"
        return got[0], torch.cat(expected)

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
        seq_lens_cpu=seq_lens.astype(np.int32),
        block_table_cpu=block_table.astype(np.int32),
        slot_mapping=torch.from_numpy(slots).to(device, torch.int64),
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """The last tokens of a sequence: q [n, num_heads, head_size], keys and values [all, num_kv_heads, head_size]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))  # how far a key is behind
    scores.masked_fill_(((behind < 0) | (behind >= window)).to(q.device), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def run_case(bench: Bench, case: list[tuple[int, int]], consecutive: bool = False) -> None:
    bench.allocate([computed + query_len for computed, query_len in case], consecutive)
    history = [(i, computed) for i, (computed, _) in enumerate(case) if computed]
    steps = ([history] if history else []) + [[(i, query_len) for i, (_, query_len) in enumerate(case)]]
    for parts in steps:
        bench.check(parts)


def half_if_needed(name: str) -> str:
    return "float16" if name == "flash_attn" else "float32"


CASES = {"decode": DECODE, "equal": EQUAL_DECODE, "prompts": PROMPTS, "chunks": CHUNKS, "mixed": MIXED}
BLOCK_SIZES = {"triton": [16, 48, 64], "flash_attn": [16, 64, 256], "torch_sdpa": [1, 4, 16, 64]}
BOTH = [False, True]


@pytest.mark.parametrize(
    ("name", "block_size", "case", "consecutive"),
    matrix(
        {name: product(sizes, CASES, BOTH) for name, sizes in BLOCK_SIZES.items()},
        [(16, "decode", True), (64, "equal", False), (16, "prompts", False), (48, "mixed", False)],
    ),
)
def test_every_kind_of_step(name: str, block_size: int, case: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(block_size, 2, half_if_needed(name)), 6), CASES[case], consecutive)


HEADS = [(1, 1), (4, 4), (4, 1), (9, 3)]


@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads", "window"),
    matrix(
        {
            "triton": [(*heads, window) for heads in [*HEADS, (14, 2), (7, 1), (8, 1)] for window in (None, 7, 20)],
            "flash_attn": [(*heads, None) for heads in HEADS],
            "torch_sdpa": [(*heads, window) for heads in HEADS for window in (None, 7)],
        },
        [(4, 1, 20)],
    ),
)
def test_head_groupings(name: str, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    spec = spec_of(SMALL[name], num_kv_heads, half_if_needed(name), window)
    run_case(Bench(name, spec, num_heads), MIXED)


@pytest.mark.parametrize(
    ("name", "dtype", "consecutive"),
    matrix(dict.fromkeys(BACKENDS, product(["bfloat16", "float16"], BOTH)), [("float16", False)]),
)
def test_half_formats(name: str, dtype: str, consecutive: bool) -> None:
    run_case(Bench(name, spec_of(16, 2, dtype), 4), MIXED, consecutive)


@pytest.mark.parametrize(("name", "consecutive"), matrix(dict.fromkeys(BACKENDS, BOTH), [False]))
def test_long_contexts_and_chunks_of_several_tiles(name: str, consecutive: bool) -> None:
    bench = Bench(name, spec_of(16, 4, half_if_needed(name)), 8)
    run_case(bench, LONG_INTERPRETED if bench.is_interpreted else LONG, consecutive)


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_over_many_steps_among_others(name: str) -> None:
    bench = Bench(name, spec_of(SMALL[name], 2, half_if_needed(name)), 4, seed=3)
    bench.allocate([40, 30, 50, 20], consecutive=False)
    for parts in ([(0, 5)], [(0, 3), (1, 9)], [(2, 17), (0, 1), (1, 1)], [(3, 1), (2, 2)], [(3, 1), (0, 1), (1, 1)]):
        bench.check(parts)


@pytest.mark.parametrize("name", NAMES)
def test_decode_padding_never_lets_old_numbers_through(name: str) -> None:
    """Two like lengths share a batch; the shorter one's padding is old numbers and the null block."""
    bench = Bench(name, spec_of(SMALL[name], 1, half_if_needed(name)), 2)
    bench.allocate([6, 15], consecutive=False)
    bench.step([(0, 5), (1, 14)])
    bench.cache[bench.cache.abs() > 20] = 1e30 if bench.dtype == torch.float32 else 6e4
    bench.check([(0, 1), (1, 1)])


# Sliding windows. In every step, blocks that a window has left behind hold NaN, and their places ids or zeros.

WINDOWS = {
    "triton": [(16, 1), (16, 15), (16, 16), (16, 17), (16, 33), (48, 20), (64, 70)],
    "flash_attn": [],
    "torch_sdpa": [(1, 5), (4, 1), (4, 3), (4, 4), (4, 5), (4, 18), (16, 9), (16, 33)],
}


@pytest.mark.parametrize(
    ("name", "block_size", "window", "case", "consecutive"),
    matrix(
        {name: [(*size, *of) for size in sizes for of in product(CASES, BOTH)] for name, sizes in WINDOWS.items()},
        [(16, 17, "decode", False), (16, 1, "equal", False)],
    ),
)
def test_windows_smaller_and_larger_than_a_block(
    name: str, block_size: int, window: int, case: str, consecutive: bool
) -> None:
    run_case(Bench(name, spec_of(block_size, 2, window=window), 6), CASES[case], consecutive)


@pytest.mark.parametrize(
    ("name", "dtype", "window"),
    matrix(dict.fromkeys(BACKENDS, product(["bfloat16", "float16"], [6, 16])) | {"flash_attn": []}, []),
)
def test_windows_of_half_formats(name: str, dtype: str, window: int) -> None:
    run_case(Bench(name, spec_of(SMALL[name], 2, dtype, window), 4), MIXED)


@pytest.mark.parametrize(
    ("name", "dtype", "window"),
    matrix(
        dict.fromkeys(BACKENDS, product(["float32", "bfloat16"], [None, 20])) | {"flash_attn": [("bfloat16", None)]},
        [],
    ),
)
def test_heads_of_256(name: str, dtype: str, window: int | None) -> None:
    run_case(Bench(name, spec_of(16, 1, dtype, window, head_size=256), 4), MIXED)


@pytest.mark.parametrize(
    ("name", "window", "consecutive"),
    matrix(dict.fromkeys(BACKENDS, product([40, 256, 500, 800], BOTH)) | {"flash_attn": []}, [(40, False)]),
)
def test_windows_over_chunks_and_prompts_of_several_tiles(name: str, window: int, consecutive: bool) -> None:
    bench = Bench(name, spec_of(16, 2, window=window), 4)
    run_case(bench, LONG_INTERPRETED if bench.is_interpreted else LONG, consecutive)


CHUNKINGS = [[1] * 40, [4] * 10, [5, 3, 8, 1, 1, 7, 15], [13, 1, 26], [40]]


@pytest.mark.parametrize(
    ("name", "window", "chunks"),
    matrix(
        {
            "triton": product([1, 4, 9, 16, 21], CHUNKINGS),
            "flash_attn": [],
            "torch_sdpa": product([1, 4, 6, 9], CHUNKINGS),
        },
        [(9, [13, 1, 26])],
    ),
)
def test_a_window_over_chunks_of_any_length(name: str, window: int, chunks: list[int]) -> None:
    """Beside it a sequence that decodes, and whose window moves on too."""
    bench = Bench(name, spec_of(SMALL[name], 2, window=window), 4, seed=5)
    bench.allocate([40, 60], consecutive=False)
    bench.step([(1, 11)])
    for chunk in chunks:
        bench.check([(0, chunk), (1, 1)])


# Layers of other shapes in the same memory.

NEIGHBOURS = [
    (spec_of(4, 4), spec_of(8, 2, window=10)),  # two heads beside one
    (spec_of(4, 3), spec_of(6, 2)),  # no common part but 1
    (spec_of(8, 2), spec_of(4, 2, head_size=32)),
    (spec_of(16, 1, window=9), spec_of(4, 4, window=30)),
    (spec_of(4, 2, "bfloat16", head_size=32), spec_of(16, 1, "bfloat16", window=7)),
]
NEIGHBOURS_OF_16 = [
    (spec_of(16, 4), spec_of(32, 2, window=10)),
    (spec_of(32, 3), spec_of(48, 2)),
    (spec_of(16, 2, "float16", head_size=32), spec_of(64, 1, "float16", window=7)),
]
HALF_NEIGHBOURS = [(spec_of(16, 4, "float16"), spec_of(32, 2, "float16"))]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    matrix({"triton": NEIGHBOURS_OF_16, "flash_attn": HALF_NEIGHBOURS, "torch_sdpa": NEIGHBOURS}, NEIGHBOURS_OF_16[:1]),
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
    decodes = 1 if benches[0].is_interpreted else 9
    for parts in ([(0, 7)], [(1, 20), (0, 1)], [(0, 12), (1, 1)], *[[(1, 1), (0, 1)]] * decodes, [(0, 11)]):
        for bench in benches:
            bench.check(parts)


# The choice of a backend, and what each refuses.


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_runs_on_its_own_device_alone(name: str) -> None:
    for device in {"cpu", "cuda", "meta"} - {RUNS_ON[name]}:
        reason = BACKENDS[name].refusal(spec_of(16, 1, "float16"), torch.device(device))
        assert reason is not None
        assert reason.endswith(f"not on {device}")


@pytest.mark.skipif("triton" not in NAMES, reason="triton is not installed")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(16, 1, head_size=264), "16 to 256 numbers, not 264"),
        (spec_of(16, 1, head_size=8), "16 to 256 numbers, not 8"),
        (spec_of(16, 1, head_size=68), "a multiple of 8 .* not 68"),
        (spec_of(8, 1), "a multiple of 16 tokens, not 8"),
        (spec_of(24, 1, window=5), "a multiple of 16 tokens, not 24"),
        (spec_of(16, 1, "int8"), "no dtype int8"),
    ],
)
def test_what_triton_refuses(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_backend("triton", spec, 1, torch.device("cuda"))


def test_on_a_gpu_auto_takes_triton() -> None:
    if "triton" not in NAMES:
        pytest.skip("triton is not installed")
    assert choose_backend("auto", spec_of(16, 1), 4, torch.device("cuda")).name == "triton"


def test_flash_attn_is_refused_where_it_cannot_be_imported() -> None:
    if "flash_attn" in NAMES:
        pytest.skip("a flash-attn package is installed")
    with pytest.raises(ConfigError, match=r"flash_attn_interface cannot be imported.*, flash_attn cannot be imported"):
        choose_backend("flash_attn", spec_of(256, 1, "float16", head_size=64), 4, torch.device("cuda"))


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
