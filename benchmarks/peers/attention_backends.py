"""ringcore's attention backends, one layer of each alone on a device: a child process of the harness.

Caches are filled by the backend's own `forward`, so nothing here knows how its pages lie. What it gives is compared
with attention over whole sequences before it is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts
from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import BACKENDS
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.attention.fp8_rows import rounded
from ringcore.kernels.launch.device_timer import PAST_L2_BYTES, timer
from ringcore.kv_cache.spec import FullAttentionSpec

PACKAGES = ("ringcore", "torch", "triton", "flash-attn", "flash-attn-3")
FILL_TOKENS = 1 << 15  # in one call, or one sequence where that is more
CHECKED_ROWS = 32
APART = ", each reads its own"  # of a backend's name: sequences that share a prefix are not read together
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # of the norm: roundings of the weights


@dataclass
class Shape:
    lens: list[int]  # tokens of each sequence
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    is_fp8: bool = False  # keys and values
    shared: int = 0  # the first tokens of each sequence, in the same blocks; a multiple of block_size

    @property
    def layer(self) -> AttentionSpec:
        return AttentionSpec(self.num_heads, self.head_size**-0.5)

    @property
    def spec(self) -> FullAttentionSpec:
        shape = self.block_size, self.num_kv_heads, self.head_size, self.dtype
        return FullAttentionSpec(*shape, is_fp8=self.is_fp8)

    @property
    def kv_bytes(self) -> int:
        """What is shared counts once."""
        return (sum(self.lens) - self.shared * (len(self.lens) - 1)) * self.spec.page_size_bytes // self.block_size

    @property
    def causal_flops(self) -> float:
        return sum(2.0 * self.num_heads * self.head_size * length**2 for length in self.lens)


@dataclass
class Bench:
    """Sequences in shuffled blocks of one cache."""

    backend: AttentionBackend
    shape: Shape
    device: torch.device
    checked: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # keys, values by sequence

    def __post_init__(self) -> None:
        needed = [-(-length // self.shape.block_size) for length in self.shape.lens]
        ids = list(range(1, sum(needed) + 1))
        random.Random(0).shuffle(ids)
        self.tables = np.zeros((len(needed), max(needed)), np.int32)
        for row, count in zip(self.tables, needed, strict=True):
            row[:count] = [ids.pop() for _ in range(count)]
        num_shared = self.shape.shared // self.shape.block_size
        self.tables[:, :num_shared] = self.tables[0, :num_shared]
        self.dtype = getattr(torch, self.shape.dtype)
        cache_shape = self.backend.kv_cache_shape(sum(needed) + 1)
        self.cache = torch.zeros(cache_shape, dtype=self.backend.storage_dtype, device=self.device)
        self.layer = self.shape.layer
        self.prefix = [self.random(self.shape.shared, self.shape.num_kv_heads) for _ in range(2)]  # keys, values

    def metadata(self, first: int, end: int, new: list[int]) -> AttentionMetadata:
        """A step of the last `new` tokens of sequences first to end."""
        lens = np.array(self.shape.lens[first:end], np.int32)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        slots = []
        for table, length, count in zip(self.tables[first:end], lens, new, strict=True):
            positions = np.arange(length - count, length)
            blocks = table[positions // self.shape.block_size].astype(np.int64)
            slots.append(blocks * self.shape.block_size + positions % self.shape.block_size)
        return AttentionMetadata(
            num_tokens=sum(new),
            num_seqs=end - first,
            max_query_len=max(new),
            max_seq_len=int(lens.max()),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            block_table_cpu=self.tables[first:end],
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(self.device),
            num_decodes=end - first if max(new) == 1 else 0,
        )

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, self.shape.head_size, device=self.device, dtype=self.dtype)

    def compute(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens of sequences first to end, as fresh prompts: query, key, value, and what came out."""
        new = self.shape.lens[first:end]
        query = self.random(sum(new), self.shape.num_heads)
        key, value = (self.random(sum(new), self.shape.num_kv_heads) for _ in range(2))
        for start in np.cumsum([0, *new[:-1]]).tolist():
            for numbers, prefix in zip((key, value), self.prefix, strict=True):
                numbers[start : start + len(prefix)] = prefix
        step = self.metadata(first, end, new)
        out = self.backend.forward(query, key, value, self.cache, step, self.backend.plan(step), self.layer)
        return query, key, value, out

    def fill(self) -> None:
        """The cache, in calls of about FILL_TOKENS tokens; keeps the keys and values of the first and last sequence."""
        first, count = 0, len(self.shape.lens)
        while first < count:
            end = first + 1
            while end < count and sum(self.shape.lens[first : end + 1]) <= FILL_TOKENS:
                end += 1
            _, key, value, _ = self.compute(first, end)
            if first == 0:
                self.checked[0] = key[: self.shape.lens[0]].clone(), value[: self.shape.lens[0]].clone()
            if end == count:
                self.checked[count - 1] = key[-self.shape.lens[-1] :].clone(), value[-self.shape.lens[-1] :].clone()
            first = end

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """`query` and `out`: the last rows of one sequence; key and value: of all its tokens, rounded where they are
        stored rounded."""
        if self.shape.is_fp8:
            key, value = rounded(key), rounded(value)
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self.layer.scale
        first_row = len(key) - len(query)
        positions = torch.arange(len(key), device=self.device)
        rows = torch.arange(first_row, len(key), device=self.device)
        scores.masked_fill_(positions[None, :] > rows[:, None], float("-inf"))
        right = (scores.softmax(-1) @ values).transpose(0, 1)
        error = ((out.float() - right).norm() / right.norm()).item()
        if not error <= TOLERANCE[self.dtype]:
            raise RuntimeError(f"{self.backend.name} is wrong: its norm differs by {error:.2%} from the reference's")


class Backends:
    """Commands: what backends there are, and one timing of one of them. A case stays until another is wanted."""

    def __init__(self) -> None:
        self._case: Any = None
        self._prepared: dict[str, Callable[[], float]] = {}  # backend -> seconds of a call

    def load(self, device: str) -> dict[str, Any]:
        self._device = torch.device(device)
        return dict(facts(PACKAGES))

    def refusal(self, backend: str, shape: dict[str, Any]) -> str | None:
        return _class_of(backend).refusal(Shape(**shape).spec, [Shape(**shape).layer], self._device)

    def measure(self, backend: str, kind: str, shape: dict[str, Any]) -> list[Row]:
        """kind "decode": one token of each sequence; "prefill": all tokens of each."""
        if self._case != (kind, shape):
            self._prepared, self._case = {}, (kind, shape)
        described = Shape(**shape)
        if backend not in self._prepared:
            torch.manual_seed(0)
            made = _class_of(backend)(described.spec, [described.layer])
            if backend.endswith(APART):
                made._choose_prefix_tiling = lambda *_: None  # type: ignore[attr-defined]
            bench = Bench(made, described, self._device)
            self._prepared[backend] = (prepare_decode if kind == "decode" else prepare_prefill)(bench)
        seconds = self._prepared[backend]()
        if kind == "decode":
            return [("KV cache read", "GB/s", described.kv_bytes / seconds / 1e9), ("a layer", "µs", seconds * 1e6)]
        return [("products", "TFLOP/s", described.causal_flops / seconds / 1e12), ("a layer", "µs", seconds * 1e6)]


def _class_of(backend: str) -> Any:
    return BACKENDS[backend.removesuffix(APART)]


def prepare_decode(bench: Bench) -> Callable[[], float]:
    """Fills and checks; calls go over copies of the cache, which do not fit the L2 together."""
    bench.fill()
    count = len(bench.shape.lens)
    step = bench.metadata(0, count, [1] * count)
    query = bench.random(count, bench.shape.num_heads)
    key, value = (bench.random(count, bench.shape.num_kv_heads) for _ in range(2))
    plan, forward = bench.backend.plan(step), bench.backend.forward
    for sequence, (keys, values) in bench.checked.items():
        keys[-1], values[-1] = key[sequence], value[sequence]
    out = forward(query, key, value, bench.cache, step, plan, bench.layer)
    for sequence, (keys, values) in bench.checked.items():
        bench.check(query[sequence : sequence + 1], keys, values, out[sequence : sequence + 1])
    if bench.backend.accepts_prewritten_kv:
        key = value = None  # type: ignore[assignment]
    num_copies = -(-PAST_L2_BYTES // bench.shape.kv_bytes) if bench.device.type == "cuda" else 1
    caches = [bench.cache, *(bench.cache.clone() for _ in range(num_copies - 1))]

    def call() -> None:
        for cache in caches:
            forward(query, key, value, cache, step, plan, bench.layer)

    return timer(call, len(caches), bench.device, in_graph=True)


def prepare_prefill(bench: Bench) -> Callable[[], float]:
    count = len(bench.shape.lens)
    query, key, value, out = bench.compute(0, count)
    first, last = bench.shape.lens[0], bench.shape.lens[-1]
    rows = min(CHECKED_ROWS, first, last)
    bench.check(query[first - rows : first], key[:first], value[:first], out[first - rows : first])
    bench.check(query[-rows:], key[-last:], value[-last:], out[-rows:])
    step = bench.metadata(0, count, bench.shape.lens)
    plan, forward = bench.backend.plan(step), bench.backend.forward
    return timer(lambda: forward(query, key, value, bench.cache, step, plan, bench.layer), 1, bench.device, False)


if __name__ == "__main__":
    backends = Backends()
    serve({"load": backends.load, "refusal": backends.refusal, "measure": backends.measure})
