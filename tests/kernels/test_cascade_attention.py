"""The decode kernel over sequences that share a prefix, against attention sequence by sequence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from paged_batch import PagedBatch, assert_close

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
from ringcore.kernels.attention.paged_attention_reference import paged_attention_decode_reference
from ringcore.kernels.attention.prefix_tiling import PrefixTiling
from ringcore.kernels.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the barrier needs programs that run at once")
pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]
HERE = Path(__file__).parent


def long_form(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long_form)


class Group(NamedTuple):
    sequences: Sequence[int]
    num_blocks: int


def batch_of(lens: Sequence[int], groups: Sequence[Group], **shape) -> PagedBatch:
    batch = PagedBatch.make([(1, n) for n in lens], **shape)
    for sequences, num_blocks in groups:
        first, *others = sequences
        batch.block_table[others, :num_blocks] = batch.block_table[first, :num_blocks]
    return batch


class Bench(NamedTuple):
    batch: PagedBatch
    tile_scheduler: DecodeTileScheduler
    tiling: PrefixTiling

    @classmethod
    def make(cls, batch: PagedBatch, num_programs: int | None, max_spans: int) -> Bench:
        num_seqs, num_heads, head_size = batch.query.shape
        block_size, num_kv_heads = batch.kv_cache.shape[-2], batch.kv_cache.shape[-3]
        tiling = DecodeTiling.choose(num_seqs, max(head_size, batch.v_head_size), batch.query.dtype)
        options = {"v_head_size": batch.v_head_size, "num_programs": num_programs}
        scheduler = DecodeTileScheduler.allocate(
            num_heads, num_kv_heads, head_size, tiling, batch.query.device, **options
        )
        heads = num_kv_heads, num_heads // num_kv_heads, batch.v_head_size
        fewest = {"min_lanes": 1, "min_tiles": 2, "min_saved_tiles": 3}
        cut = PrefixTiling(tiling.tile_tokens, block_size, *heads, max_spans, **fewest)
        return cls(batch, scheduler, cut)

    def plan(self) -> SharedPrefixes:
        shared = find_shared_prefixes(self.batch.block_table, self.batch.seq_lens, self.tiling)
        self.tile_scheduler.plan(self.batch.seq_lens, shared=shared.words)
        return shared

    def decode(self, shared: SharedPrefixes | None, out: torch.Tensor | None = None, **scores) -> torch.Tensor:
        batch = self.batch
        out = batch.poisoned_out() if out is None else out
        tables = batch.block_table, batch.seq_lens
        scheduler, scale = self.tile_scheduler, batch.scale
        paged_attention_decode(batch.query, batch.kv_cache, *tables, scheduler, scale, shared=shared, out=out, **scores)
        assert (self.tile_scheduler.partials == UNWRITTEN.value).all()
        return out

    def expected(self, **scores) -> torch.Tensor:
        batch = self.batch
        tables = batch.block_table, batch.seq_lens
        return paged_attention_decode_reference(
            batch.query, batch.kv_cache, *tables, self.tile_scheduler, batch.scale, **scores
        )


def check(
    lens: Sequence[int],
    groups: Sequence[Group],
    *,
    num_shared: int,
    num_programs: int | None = 5,
    max_spans: int = 2,
    softcap: float | None = None,
    sinks: bool = False,
    **shape,
) -> None:
    """num_shared: sequences that are to be in groups."""
    batch = batch_of(lens, groups, **({"head_size": 16, "dtype": torch.float16} | shape))
    bench = Bench.make(batch, num_programs, max_spans)
    shared = bench.plan()
    assert shared.tiles.count_nonzero() == num_shared
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None}
    first = bench.decode(shared, **scores)
    assert_close(first, bench.expected(**scores))
    if batch.query.is_cuda:
        assert torch.equal(bench.decode(shared, **scores), first), "a plan serves every layer of its step"


MIXED = [300, 290, 70, 321, 600, 600, 0, 65]
TWO_GROUPS = [Group((0, 1, 3), 16), Group((5, 4), 32)]


@pytest.mark.parametrize(("num_programs", "max_spans"), [long_form(5, 2), (60, 3)])
def test_groups_beside_sequences_that_share_nothing(device, num_programs, max_spans):
    """With 60 programs own tokens are split too."""
    check(MIXED, TWO_GROUPS, num_shared=5, num_programs=num_programs, max_spans=max_spans, device=device)


@pytest.mark.parametrize("own", [1, long_form(64), 65])
def test_ends_of_own_tokens(device, own):
    check([256 + own] * 4, [Group(range(4), 16)], num_shared=4, max_spans=1, num_programs=1, device=device)


def test_a_group_of_one_is_none(device):
    check([300] * 2 + [200], [Group((0,), 16)], num_shared=0, device=device)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "count"),
    [(7, 1, 11), long_form(2, 2, 3), long_form(32, 1, 5), long_form(6, 2, 43)],
    ids=str,
)
def test_units_that_are_full_and_not(device, num_heads, num_kv_heads, count):
    """A unit has 64 rows: 9, 64, 2 and 21 sequences."""
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "device": device}
    check([130 + i % 3 for i in range(count)], [Group(range(count), 8)], num_shared=count, **shape)


@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 48},
        long_form({"block_size": 64, "head_size": 80}),
        {"block_size": 128, "head_size": 24, "v_head_size": 16},
        {"softcap": 3.0, "sinks": True, "num_heads": 6},
    ],
    ids=str,
)
def test_blocks_widths_and_scores(device, shape):
    blocks = -(-256 // shape.get("block_size", 16))
    check([300, 420, 290, 5], [Group((2, 0, 1), blocks)], num_shared=3, num_programs=7, **shape, device=device)


def test_without_a_group_it_is_the_plain_kernel(device):
    """To the last bit."""
    bench = Bench.make(batch_of(MIXED, [], device=device, head_size=16, dtype=torch.float16), 5, 2)
    shared = bench.plan()
    assert torch.equal(bench.decode(shared), bench.decode(None))


def test_not_a_number_stays_with_its_sequence(device):
    bench = Bench.make(batch_of([200] * 4, [Group(range(4), 8)], device=device, dtype=torch.float16), 3, 1)
    bench.batch.query[1] = torch.nan
    out = bench.decode(bench.plan())
    assert out[1].isnan().all()
    assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.long_form
def test_it_is_compiled_for_sm90_without_spills(tmp_path):
    """And in the carve-out of shared memory that it has without shared prefixes, with two programs on an SM."""
    script = """
        import re, subprocess, torch, triton, triton_for_sm90
        from pathlib import Path
        from ringcore.kernels.attention import cascade_attention, paged_attention_decode
        from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
        from ringcore.kernels.attention.decode_tiling import DecodeTiling
        from ringcore.kernels.launch.precompile import intercept_launches
        from ringcore.kernels.attention.prefix_tiling import PrefixTiling
        from ringcore.kernels.attention.shared_prefixes import find_shared_prefixes

        cpu, dtype = torch.device("cpu"), torch.bfloat16
        paged_attention_decode.supports_pdl = lambda device: True
        cascade_attention.PrefixTensors.passes = lambda tensors: (cascade_attention.BOTH.value,)
        table, lens = torch.zeros(64, 128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        for num_heads, head_size in ((16, 128), (32, 128), (32, 64)):
            scheduler = DecodeTileScheduler.allocate(
                num_heads, 8, head_size, DecodeTiling.choose(64, head_size, dtype), cpu, num_programs=264
            )
            query = torch.zeros(64, num_heads, head_size, dtype=dtype)
            cache = torch.zeros(4, 2, 8, 16, head_size, dtype=dtype)
            with intercept_launches() as others:
                shared = find_shared_prefixes(table, lens, PrefixTiling.choose(scheduler, 64, 16, dtype))
                scheduler.plan(lens, shared=shared.words)
            for variant in others.values():
                variant.compile(load=False)
            sizes = []
            for prefixes in (None, shared):
                with intercept_launches() as intercepted:
                    paged_attention_decode.paged_attention_decode(
                        query, cache, table, lens, scheduler, 1.0, shared=prefixes
                    )
                (variant,) = intercepted.values()
                compiled = variant.kernel.preload(variant.specialization)
                Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
                usage = subprocess.run([dump, "--dump-resource-usage", "kernel.cubin"], capture_output=True, text=True)
                (stack,) = map(int, re.findall(r"STACK:(\\d+)", usage.stdout))
                sizes.append((compiled.metadata.shared, stack, "wgmma.mma_async" in compiled.asm["ptx"]))
            assert [has_wgmma for *_, has_wgmma in sizes] == [False, True], sizes
            assert max(stack for _, stack, _ in sizes) <= 8, sizes  # two registers, by which ptxas saves dozens
            # KiB of Hopper's carve-outs; the driver reserves one for each program.
            needed = [2 * (size + 1024) / 1024 for size, *_ in sizes]
            assert len({next(kib for kib in (64, 100, 132, 164) if need <= kib) for need in needed}) == 1, sizes
        print("compiled")
    """
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.stdout == "compiled\n", done.stderr


REAL = {"dtype": torch.bfloat16, "num_programs": None}


@needs_gpu
@pytest.mark.parametrize("max_spans", [1, 2, 8])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (32, 8, 64), (28, 4, 128), (32, 32, 96)], ids=str)
@pytest.mark.parametrize("num_seqs", [16, 256, 700])
def test_real_shapes(device, num_seqs, heads, max_spans):
    num_heads, num_kv_heads, head_size = heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "device": device}
    lens = [1001 + 37 * i % 300 for i in range(num_seqs)]
    half = num_seqs // 2
    for groups in ([Group(range(num_seqs), 62)], [Group(range(half), 62), Group(range(half, num_seqs - 1), 40)]):
        num_shared = sum(len(group.sequences) for group in groups)
        check(lens, groups, num_shared=num_shared, max_spans=max_spans, **shape, **REAL)


@needs_gpu
def test_a_graph_serves_steps_that_share_and_do_not(device):
    """Many launches, one after the other: the barrier is left as it was found."""
    shape = {"device": device, "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    lens = [1100 + i % 200 for i in range(64)]
    kinds = [[Group(range(64), 60)], [], [Group(range(1, 40), 50), Group(range(40, 64), 60)]]
    batches = [batch_of(lens, groups, **shape) for groups in kinds]
    bench = Bench.make(batches[0], None, 4)
    static = batches[0]
    out = static.poisoned_out()

    def step() -> None:
        shared = bench.plan()
        for _ in range(36):
            paged_attention_decode(
                static.query,
                static.kv_cache,
                static.block_table,
                static.seq_lens,
                bench.tile_scheduler,
                static.scale,
                shared=shared,
                out=out,
            )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    tables = [batch.block_table.clone() for batch in batches]
    for table in tables * 3:
        static.block_table.copy_(table)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, bench.expected())
