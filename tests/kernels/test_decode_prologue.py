"""The decode kernel with its prologue against `qk_norm_rope` and the decode kernel without it: the same bits, of the
output and in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from paged_batch import PagedBatch
from test_cascade_attention import MIXED, TWO_GROUPS, Bench, Group, batch_of
from test_paged_attention_decode import BFLOAT16, SKEWED, needs_gpu, scheduler_of
from test_precompile import run

from ringcore.kernels.decode_prologue import DecodePrologue, has_prologue
from ringcore.kernels.decode_scheduler import DecodeTileScheduler, DecodeTiling
from ringcore.kernels.paged_attention_decode import paged_attention_decode
from ringcore.kernels.qk_norm_rope import qk_norm_rope
from ringcore.kernels.span_scheduler import SpanTileScheduler
from ringcore.kernels.unrotated_heads import UnrotatedHeads

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


def slots_of(batch: PagedBatch, block_size: int) -> torch.Tensor:
    """Of the last token of each sequence; of an empty one in the null block."""
    last = (batch.seq_lens.long() - 1).clamp(min=0)
    blocks = batch.block_table.long().gather(1, (last // block_size)[:, None])[:, 0]
    return torch.where(batch.seq_lens > 0, blocks * block_size + last % block_size, last)


def check(
    lens: list[int],
    num_programs: int | None,
    *,
    device: torch.device,
    norm: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    key_gain: float = 1.0,
    skips_empty: bool = False,
    num_layers: int = 1,
    groups: Sequence[Group] = (),
    **shape,
) -> None:
    """num_layers: launches with other heads, which share a plan and their buffers. groups: of sequences that share a
    prefix, which is attended to once."""
    block_size = shape.setdefault("block_size", 16)
    batch = batch_of(lens, groups, window=window, device=device, **shape)
    (n, num_heads, head_size), dtype = batch.query.shape, batch.query.dtype
    num_kv_heads = batch.kv_cache.shape[2]
    tile_scheduler = scheduler_of(batch, num_programs, window)
    assert has_prologue(tile_scheduler)
    shared = None
    if groups:
        bench = Bench.make(batch, num_programs, 3)
        tile_scheduler, shared = bench.tile_scheduler, bench.plan()
        assert shared.tiles.any()
    else:
        tile_scheduler.plan(batch.seq_lens, skips_empty=skips_empty)
    inputs = batch.block_table, batch.seq_lens, tile_scheduler, batch.scale
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None, "shared": shared}
    random = torch.Generator(device).manual_seed(sum(lens))
    gain = 1 + 0.3 * torch.randn(2, head_size, generator=random, device=device) if norm else None
    if gain is not None:
        gain[1] *= key_gain
    cos_sin = torch.randn(n, head_size, generator=random, device=device)
    qkv = torch.empty(n, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype, device=device)
    rotated, query = torch.empty_like(qkv), torch.full((n, num_heads, head_size), torch.nan, dtype=dtype, device=device)
    slots = slots_of(batch, block_size)
    batch.kv_cache[slots // block_size, :, :, slots % block_size] = torch.nan
    cache, expected_cache = batch.kv_cache, batch.kv_cache.clone()
    prologue = DecodePrologue(UnrotatedHeads(qkv, cos_sin, gain, 1e-6), slots)
    for _ in range(num_layers):
        qkv.normal_(generator=random)
        qk_norm_rope(
            *(qkv, None, cos_sin, num_heads, num_kv_heads),
            norm_weight=gain,
            eps=1e-6,
            kv_cache=expected_cache,
            slot_mapping=slots,
            out=rotated,
        )
        before = rotated.view(n, -1, head_size)[:, :num_heads]
        expected = paged_attention_decode(before, expected_cache, *inputs, **scores, out=batch.poisoned_out())
        out = paged_attention_decode(query, cache, *inputs, **scores, out=batch.poisoned_out(), prologue=prologue)
        assert out[batch.seq_lens > 0].isfinite().all()
        assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(cache[1:].nan_to_num(7), expected_cache[1:].nan_to_num(7))  # the null block has no owner


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("num_programs", [1, 5])
def test_work_items_that_programs_share(device, dtype, num_programs) -> None:
    check(SKEWED, num_programs, device=device, dtype=dtype, head_size=16)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "norm"),
    [(2, 2, 16, True), (4, 1, 16, False), (8, 2, 80, True), (8, 1, 128, True), (6, 2, 24, False)],
)
def test_groups_and_head_sizes(device, num_heads, num_kv_heads, head_size, norm) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "block_size": 32}
    check([70, 1, 33], 4, device=device, norm=norm, **shape)


@pytest.mark.parametrize(("num_programs", "skips_empty"), [(1, False), (40, True)])
def test_more_work_items_than_a_round_and_sequences_of_no_tokens(device, num_programs, skips_empty) -> None:
    """Of 16 numbers a round has 32 work items."""
    lens = [0, 5, 0, *range(1, 20), 70, 0, 0]
    check(lens, num_programs, device=device, skips_empty=skips_empty, num_heads=8, num_kv_heads=4, head_size=16)


def test_what_a_layer_may_ask_for(device) -> None:
    check([130, 3, 90], 4, device=device, window=65, softcap=30.0, sinks=True, num_heads=6, head_size=16)


@pytest.mark.parametrize(
    ("kind", "num_heads", "v_head_size", "expected"),
    [
        (DecodeTileScheduler, 14, 128, True),
        (SpanTileScheduler, 14, 128, False),
        (DecodeTileScheduler, 14, 64, False),
        (DecodeTileScheduler, 71, 128, False),
    ],
    ids=["served", "spans", "values of another width", "a group too large for registers"],
)
def test_what_has_a_prologue(kind, num_heads, v_head_size, expected) -> None:
    tiling = DecodeTiling.choose(1, 128, torch.bfloat16)
    options = {"v_head_size": v_head_size, "num_programs": 1}
    assert has_prologue(kind.allocate(num_heads, 1, 128, tiling, torch.device("cpu"), **options)) == expected


def test_keys_that_overflow_are_finite_in_the_cache(device) -> None:
    check([40, 17], 3, device=device, dtype=torch.float16, head_size=16, key_gain=1e5)


def test_queries_of_a_prefix_that_sequences_share(device) -> None:
    check(MIXED, 20, device=device, groups=TWO_GROUPS, dtype=torch.float16, head_size=16)


@needs_gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(16, 8, 128), (32, 8, 128), (32, 8, 64)])
@pytest.mark.parametrize("lens", [[640], [131072], [1 + 70 * i for i in range(64)], [500] * 8, [9000, *[3] * 63]])
def test_shapes_of_models(device, lens, num_heads, num_kv_heads, head_size) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    check(lens, None, device=device, dtype=torch.bfloat16, num_layers=20, **shape)


@needs_gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8)])
def test_a_shared_prefix_in_shapes_of_models(device, num_heads, num_kv_heads) -> None:
    lens, groups = [1700 + 40 * i for i in range(64)], [Group(tuple(range(8, 60)), 100)]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": 128, "dtype": torch.bfloat16}
    check(lens, None, device=device, groups=groups, num_layers=20, **shape)


COMPILED = """
    import torch, triton_for_sm90
    from ringcore.kernels import paged_attention_decode as decode
    from ringcore.kernels.decode_prologue import DecodePrologue
    from ringcore.kernels.decode_scheduler import DecodeTileScheduler, DecodeTiling
    from ringcore.kernels.page_layout import PageLayout
    from ringcore.kernels.precompile import intercept_launches
    from ringcore.kernels.unrotated_heads import UnrotatedHeads

    decode.supports_pdl, decode.prefer_carveout = lambda device: True, lambda *kernel: None
    for num_seqs in [{num_seqs}]:
        qkv, query = torch.zeros(num_seqs, 32 * 128).bfloat16(), torch.zeros(num_seqs, 16, 128).bfloat16()
        heads = UnrotatedHeads(qkv, torch.zeros(num_seqs, 128), {gain}, 1e-6)
        tiling = DecodeTiling.choose(num_seqs, 128, torch.bfloat16)
        schedule = DecodeTileScheduler.allocate(16, 8, 128, tiling, torch.device("cpu"))
        pages = torch.zeros(PageLayout.shape(4, 8, 16, 128, 128)).bfloat16()
        table = torch.zeros(num_seqs, 4, dtype=torch.int32)
        for prologue in (None, DecodePrologue(heads, torch.zeros(num_seqs, dtype=torch.int64))):
            with intercept_launches() as found:
                inputs = query, pages, table, table[:, 0], schedule, 1.0
                decode.paged_attention_decode(*inputs, prologue=prologue)
            ((kernel, variant),) = [(kernel, found[kernel, key].specialization) for kernel, key in found]
            text = kernel.preload(variant).asm["ptx"]
            before = text[: text.index("cp.async.cg")]
            print(text.count("cp.async.cg"), -1 < before.rfind("st.global") < before.rfind("bar.sync"))
"""


@pytest.mark.long_form
@pytest.mark.parametrize(("num_seqs", "gain"), [(1, "torch.zeros(2, 128).bfloat16()"), (8, "None")])
def test_the_main_loop_stays_pipelined_and_begins_after_the_barrier(tmp_path, num_seqs, gain) -> None:
    """Compiled for a GPU: as many asynchronous copies as without a prologue, all after what it stores and a barrier."""
    told = run(COMPILED.format(num_seqs=num_seqs, gain=gain), tmp_path).split()
    plain, is_after_stores, with_prologue, is_after_barrier = told
    assert (plain, is_after_stores, is_after_barrier) == (with_prologue, "False", "True")
