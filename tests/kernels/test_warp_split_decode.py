"""Decode attention by warps against attention sequence by sequence in float32: Gluon has no interpreter, so a GPU alone
shows its numbers. Without one it is compiled for an H200."""

from __future__ import annotations

import pytest
import torch
from paged_batch import PagedBatch, assert_close, in_fp8

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.head_rotation import HeadRotation
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
from ringcore.kernels.attention.paged_attention_reference import paged_attention_decode_reference
from ringcore.kernels.attention.prefix_tiling import PrefixTiling
from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ringcore.kernels.attention.shared_prefixes import find_shared_prefixes
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN
from ringcore.kernels.linears.tma_configs import has_wgmma
from tests.kernels.test_precompile import run

DEVICE = torch.device("cuda", 0)
needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_wgmma(DEVICE)), reason="needs a GPU of compute capability 9"
)
SKEWED = [1, 330, 3, 64, 65, 1]
MANY_ITEMS = [5, 70, 1, 130, 64, 63] * 9  # several in a range


def scheduler_of(batch: PagedBatch, num_programs: int | None, **options: int | None) -> DecodeTileScheduler:
    num_seqs, num_heads, head_size = batch.query.shape
    num_kv_heads, sizes = PageLayout.of(batch.kv_cache, head_size).num_kv_heads, (head_size, batch.v_head_size)
    group, dtypes = num_heads // num_kv_heads, (batch.query.dtype, batch.kv_cache.dtype)
    tiling = DecodeTiling.choose_by_warps(num_seqs, sizes, dtypes, group, batch.query.device)
    assert tiling is not None
    shape = num_heads, num_kv_heads, head_size
    return DecodeTileScheduler.allocate(*shape, tiling, DEVICE, num_programs=num_programs, **options)


def decode(batch: PagedBatch, tile_scheduler: DecodeTileScheduler, **options) -> torch.Tensor:
    out = batch.poisoned_out()
    step = batch.query, batch.kv_cache, batch.block_table, batch.seq_lens
    paged_attention_decode(*step, tile_scheduler, batch.scale, out=out, **options)
    assert (tile_scheduler.partials == UNWRITTEN.value).all(), "the workspace is not reset for the next launch"
    return out


def unrotated(
    batch: PagedBatch, num_kv_heads: int, *, has_norm: bool
) -> tuple[torch.Tensor, HeadRotation, torch.Tensor, torch.Tensor]:
    """Puts NaN in the slots of the step -> q before its rotation, as the first heads of a QKV projection, the rotation,
    q after it, and the cache with the step's keys and values, one of which overflows float16."""
    num_seqs, num_heads, head_size = batch.query.shape
    is_row = batch.seq_lens > 0
    rows, last = is_row.nonzero().squeeze(1), batch.seq_lens[is_row].long() - 1
    slots = batch.block_table[rows, last // 16].long() * 16 + last % 16
    batch.kv_cache[slots // 16, :, :, slots % 16] = torch.nan
    qkv = torch.randn(num_seqs, (num_heads + 2 * num_kv_heads) * head_size, device=DEVICE).to(batch.query.dtype)
    if batch.query.dtype == torch.float16:
        qkv[int(rows[-1]), num_heads * head_size :][:2] = 60000.0
    angles = torch.randn(num_seqs, head_size // 2, device=DEVICE)
    angles[:, 0] = 0.785
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    gain = torch.randn(2, head_size, device=DEVICE).to(batch.query.dtype) if has_norm else None
    kv_cache, after = batch.kv_cache.clone(), qkv.clone()
    written = {"norm_weight": gain, "eps": 1e-6, "kv_cache": kv_cache, "slot_mapping": slots}
    after[rows] = qk_norm_rope_reference(qkv[rows], None, cos_sin[rows], num_heads, num_kv_heads, **written)
    before, after = (x.view(num_seqs, -1, head_size)[:, :num_heads] for x in (qkv, after))
    return before, HeadRotation(cos_sin, gain, 1e-6), after, kv_cache


def check(
    lens: list[int],
    num_programs: int | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    is_fp8: bool = False,
    **shape,
) -> None:
    shape = {"dtype": torch.bfloat16, "head_size": 128, "num_heads": 8, "num_kv_heads": 2, "device": DEVICE} | shape
    batch = PagedBatch.make([(1, n) for n in lens], window=window, chunk=chunk, **shape)
    if is_fp8:
        in_fp8(batch)
    tile_scheduler = scheduler_of(batch, num_programs, window=window, chunk=chunk)
    tile_scheduler.plan(batch.seq_lens)
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None}
    step = batch.query, batch.kv_cache, batch.block_table, batch.seq_lens
    expected = paged_attention_decode_reference(*step, tile_scheduler, batch.scale, **scores)
    for reads_early in (True, False):
        first = decode(batch, tile_scheduler, reads_early=reads_early, **scores)
        assert_close(first, expected)
        again = decode(batch, tile_scheduler, reads_early=reads_early, **scores)
        assert torch.equal(again, first), "a plan serves every layer of its step"


@needs_hopper
@pytest.mark.parametrize("lens", [SKEWED, MANY_ITEMS, [0, 200, 0, 5, 0, 0], [0], [64 * 35 + 3]], ids=str)
@pytest.mark.parametrize("num_programs", [1, 2, 7, 40, None])
def test_ranges(lens, num_programs) -> None:
    """Of part of a work item, of one, and of many; and more programs than tiles."""
    check(lens, num_programs)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (9, 3), (10, 2), (14, 2), (16, 2), (12, 1), (32, 2)], ids=str)
def test_heads(heads, head_size, dtype) -> None:
    num_heads, num_kv_heads = heads
    check(
        [130, 3, 700],
        9,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        block_size=32,
    )


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 63, 64, 65, 66, 127, 128, 129, 193, 320])
def test_edges_of_blocks_and_tiles(seq_len, block_size) -> None:
    check([seq_len, seq_len], 5, block_size=block_size)


@needs_hopper
@pytest.mark.parametrize("lens", [SKEWED, MANY_ITEMS, [0, 200, 0, 5, 0, 0], [64 * 35 + 3], [1001] * 40], ids=str)
@pytest.mark.parametrize("num_programs", [1, 7, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_size": 64, "num_heads": 9, "num_kv_heads": 3, "dtype": torch.float16},
        {"block_size": 48, "window": 100, "num_heads": 16},
        {"block_size": 128, "softcap": 3.0, "sinks": True},
        {"chunk": 64},
        {"num_heads": 32},
    ],
    ids=str,
)
def test_fp8(lens, num_programs, options) -> None:
    check(lens, num_programs, is_fp8=True, **options)


@needs_hopper
def test_values_of_very_different_sizes_in_fp8() -> None:
    """In the tokens of a warp: zeros, whose exponent is the smallest, and some whose weights are large next to them."""
    batch = PagedBatch.make([(1, 133)], device=DEVICE, dtype=torch.bfloat16, head_size=128)
    values = PageLayout.of(batch.kv_cache, 128).split(batch.kv_cache)[1]
    values[batch.block_table[0, 0], :, :8] = 0.0
    values[batch.block_table[0, 1]] *= 2.0**-40
    values[batch.block_table[0, 2], :, :3] *= 2.0**20
    in_fp8(batch)
    tile_scheduler = scheduler_of(batch, 2)
    tile_scheduler.plan(batch.seq_lens)
    inputs = batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, tile_scheduler, batch.scale
    assert_close(decode(batch, tile_scheduler) / 2**20, paged_attention_decode_reference(*inputs) / 2**20)


@needs_hopper
@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 63, 64, 65, 200, 5000])
def test_windows(window, num_programs) -> None:
    check(SKEWED, num_programs, window=window)


@needs_hopper
@pytest.mark.parametrize("chunk", [1, 16, 64, 65, 200, 5000])
def test_chunks(chunk) -> None:
    check(SKEWED, 5, chunk=chunk)


@needs_hopper
@pytest.mark.parametrize("num_programs", [1, 7])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_and_sinks(softcap, sinks, num_programs) -> None:
    check([130, 3, 0, 330], num_programs, softcap=softcap, sinks=sinks)


@needs_hopper
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("num_seqs", [1, 4, 5, 32, 256])
def test_real_shapes(num_seqs, num_kv_heads) -> None:
    check([1001 + 37 * i % 300 for i in range(num_seqs)], num_heads=32, num_kv_heads=num_kv_heads)


@needs_hopper
@pytest.mark.parametrize("lens", [[200, 1, 65, 129], [60] * 90, [700]], ids=str)
def test_the_token_that_the_kernel_before_writes(lens) -> None:
    """Its slot holds NaN until then; many layers of a graph, so that each begins before the one before it has ended."""
    num_heads, num_kv_heads, num_layers = 8, 2, 12
    shape = {"dtype": torch.bfloat16, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": 128}
    batch = PagedBatch.make([(1, n) for n in lens], device=DEVICE, **shape)
    rows = torch.arange(len(lens), device=DEVICE)
    last = batch.seq_lens.long() - 1
    slots = batch.block_table[rows, last // 16].long() * 16 + last % 16
    caches = [batch.kv_cache.clone() for _ in range(num_layers)]
    for cache in caches:
        cache[slots // 16, :, :, slots % 16] = torch.nan
    fused = torch.randn(len(lens), (num_heads + 2 * num_kv_heads) * 128, device=DEVICE).to(torch.bfloat16)
    angles = torch.randn(len(lens), 64, device=DEVICE)
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    tile_scheduler = scheduler_of(batch, None)
    outs = [batch.poisoned_out() for _ in range(num_layers)]
    rotated = [torch.empty_like(fused) for _ in range(num_layers)]

    def step() -> None:
        tile_scheduler.plan(batch.seq_lens)
        torch.zeros(1, device=DEVICE)  # an ordinary kernel
        for cache, qkv, out in zip(caches, rotated, outs, strict=True):
            qk_norm_rope(fused, None, cos_sin, num_heads, num_kv_heads, kv_cache=cache, slot_mapping=slots, out=qkv)
            query = qkv.view(len(lens), -1, 128)[:, :num_heads]
            tables = batch.block_table, batch.seq_lens
            paged_attention_decode(query, cache, *tables, tile_scheduler, batch.scale, out=out, reads_early=True)

    step()
    for cache in caches:
        cache[slots // 16, :, :, slots % 16] = torch.nan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    query = rotated[0].view(len(lens), -1, 128)[:, :num_heads]
    expected = paged_attention_decode_reference(
        query, caches[0], batch.block_table, batch.seq_lens, tile_scheduler, batch.scale
    )
    for out in outs:
        assert_close(out, expected)


@needs_hopper
@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "head_size"),
    [(8, 32, 128), (64, 32, 128), (40, 8, 128), (16, 56, 64), (300, 16, 64), (40, 128, 128)],
)
@pytest.mark.parametrize("scores", [{}, {"softcap": 3.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("rotates", [False, True])
def test_shared_prefixes(num_seqs, num_heads, head_size, scores, rotates) -> None:
    lens = [400 + 37 * i % 300 for i in range(num_seqs)]
    shape = {"num_heads": num_heads, "num_kv_heads": 8, "head_size": head_size, "dtype": torch.bfloat16}
    batch = PagedBatch.make([(1, n) for n in lens], device=DEVICE, **shape)
    half = num_seqs // 2
    batch.block_table[1:half, :16] = batch.block_table[0, :16]
    batch.block_table[half + 1 : -1, :20] = batch.block_table[half, :20]
    tile_scheduler = scheduler_of(batch, None)
    tiling = PrefixTiling(
        64, 16, 8, num_heads // 8, head_size, max_spans=2, min_lanes=1, min_tiles=2, min_saved_tiles=3
    )
    shared = find_shared_prefixes(batch.block_table, batch.seq_lens, tiling)
    assert shared.tiles.count_nonzero() == num_seqs - 1
    tile_scheduler.plan(batch.seq_lens, shared=shared.words)
    scores = {"softcap": scores.get("softcap"), "sinks": batch.sinks if "sinks" in scores else None}
    query, kv_cache, rotation = batch.query, batch.kv_cache, None
    if rotates:
        batch.query, rotation, query, kv_cache = unrotated(batch, 8, has_norm=True)
    step = query, kv_cache, batch.block_table, batch.seq_lens
    expected = paged_attention_decode_reference(*step, tile_scheduler, batch.scale, **scores)
    first = decode(batch, tile_scheduler, shared=shared, reads_early=True, rotation=rotation, **scores)
    assert_close(first, expected)
    again = decode(batch, tile_scheduler, shared=shared, reads_early=rotates, rotation=rotation, **scores)
    assert torch.equal(again, first)


@needs_hopper
def test_not_a_number_stays_with_its_sequence() -> None:
    shape = {"dtype": torch.bfloat16, "head_size": 128}
    batch = PagedBatch.make([(1, n) for n in (200, 70, 330, 1)], device=DEVICE, **shape)
    batch.query[1] = torch.nan
    tile_scheduler = scheduler_of(batch, 5)
    tile_scheduler.plan(batch.seq_lens)
    out = decode(batch, tile_scheduler, reads_early=True)
    assert out[1].isnan().all()
    assert out[[0, 2, 3]].isfinite().all()


@needs_hopper
@pytest.mark.parametrize("lens", [[200, 1, 65, 129], [0, 70, 0, 3], [60] * 90, [64 * 35 + 3], SKEWED], ids=str)
@pytest.mark.parametrize("num_programs", [3, None])
@pytest.mark.parametrize(
    ("num_heads", "head_size", "dtype", "has_norm"),
    [
        (8, 128, torch.bfloat16, True),
        (16, 128, torch.float16, False),
        (4, 64, torch.bfloat16, True),
        (32, 128, torch.bfloat16, True),
    ],
)
def test_rotation_within(lens, num_programs, num_heads, head_size, dtype, has_norm) -> None:
    """QK norm, rotation and KV write as `qk_norm_rope` does them, in layers that follow each other in a graph; slots of
    the step hold NaN until then, and a key overflows float16."""
    num_kv_heads, num_layers = 2, 6
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": dtype}
    batch = PagedBatch.make([(1, n) for n in lens], device=DEVICE, **shape)
    query, rotation, expected_query, expected_kv = unrotated(batch, num_kv_heads, has_norm=has_norm)
    caches = [batch.kv_cache.clone() for _ in range(num_layers)]
    tile_scheduler = scheduler_of(batch, num_programs)
    outs = [batch.poisoned_out() for _ in range(num_layers)]
    tables = batch.block_table, batch.seq_lens

    def step() -> None:
        tile_scheduler.plan(batch.seq_lens)
        for cache, out in zip(caches, outs, strict=True):
            options = {"out": out, "reads_early": True, "rotation": rotation}
            paged_attention_decode(query, cache, *tables, tile_scheduler, batch.scale, **options)

    step()
    for cache in caches:
        cache.copy_(batch.kv_cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    expected = paged_attention_decode_reference(expected_query, expected_kv, *tables, tile_scheduler, batch.scale)
    is_row = batch.seq_lens > 0
    for cache, out in zip(caches, outs, strict=True):
        assert torch.allclose(cache.float(), expected_kv.float(), rtol=2**-7, atol=1e-2, equal_nan=True)
        assert torch.equal(cache.isnan(), expected_kv.isnan()), "another slot was written"
        assert_close(out[is_row], expected[is_row])


def test_what_other_kernels_serve() -> None:
    cpu, bfloat16 = torch.device("cpu"), torch.bfloat16
    assert DecodeTiling.choose_by_warps(8, (128, 128), (bfloat16, bfloat16), 4, cpu) is None
    if torch.cuda.is_available():
        for sizes, dtypes, group in (
            ((128, 64), (bfloat16, bfloat16), 4),
            ((80, 80), (bfloat16, bfloat16), 4),
            ((128, 128), (torch.float32, torch.uint8), 4),
            ((128, 128), (torch.float32, torch.float32), 4),
            ((128, 128), (bfloat16, bfloat16), 17),
        ):
            assert DecodeTiling.choose_by_warps(8, sizes, dtypes, group, DEVICE) is None


LAUNCHES = """
    import tempfile
    import triton_for_sm90
    import torch
    from sass import disassemble
    from ringcore.kernels.attention.cascade_attention import PrefixTensors
    from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
    from ringcore.kernels.attention.decode_tiling import DecodeTiling
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.attention.head_rotation import HeadRotation
    from ringcore.kernels.attention.paged_attention_decode import _launch_by_warps

    def ints(*shape, dtype=torch.int32):
        return torch.zeros(*shape, dtype=dtype)

    def launch(group, head_size, has_prefixes=False, window=None, rotates=False, is_fp8=False, **scores):
        stages, rows = (3, 8) if group <= 8 or is_fp8 else (2, 16)
        programs, stages = (3, 4) if head_size == 64 else (2, stages)
        num_programs.append(programs)
        tiling = DecodeTiling(64, 4, stages, programs, 2, 4, rows, by_warps=True)
        shape, cpu = (8 * group, 8, head_size), torch.device("cpu")
        scheduler = DecodeTileScheduler.allocate(*shape, tiling, cpu, num_programs=264, window=window)
        query = ints(8, 8 * group, head_size, dtype=torch.bfloat16)
        cache = ints(16, 2, 8, 16, head_size, dtype=torch.bfloat16)
        if is_fp8:
            cache = ints(16, 2 * (head_size + 1), 8, 16, dtype=torch.uint8)
        prefixes = ints(2, 8, 8 * group, head_size, dtype=torch.float32)
        shared = PrefixTensors(ints(8), ints(64), ints(8), prefixes, prefixes[..., 0].contiguous(), ints(2))
        factors = 0.1, scores.get("softcap")
        tables = ints(8, 64), ints(8)
        rotation = HeadRotation(ints(8, head_size, dtype=torch.float32), query[0, :2], 1e-6) if rotates else None
        prefixes = shared if has_prefixes else PrefixTensors()
        step = query, cache, *tables, scheduler, factors, scores.get("sinks"), prefixes, query
        _launch_by_warps(*step, rotation, True)

    num_programs = []
    with intercept_launches() as found:
        launch(4, 128)
        launch(8, 64, window=128, sinks=ints(64, dtype=torch.bfloat16), softcap=30.0)
        launch(8, 64, rotates=True, has_prefixes=True)
        launch(4, 128, rotates=True, has_prefixes=True)
        launch(4, 128, is_fp8=True)
        launch(16, 128, rotates=True, has_prefixes=True)
    for programs, ((kernel, _), variant) in zip(num_programs, found.items(), strict=True):
        compiled = kernel.preload(variant.specialization)
        instructions, _ = disassemble(compiled.asm["cubin"], tempfile.mkdtemp())
        last_wait = max(i for i, one in enumerate(instructions) if one.name.startswith("ACQBULK"))
        early = sum(one.name.startswith("LDGSTS") for one in instructions[:last_wait])
        spills = sum(one.name.startswith(("STL", "LDL")) for one in instructions)
        needed = 6 if "*u8" in variant.specialization else 16
        print(early >= needed, spills, programs * (compiled.metadata.shared + 1024) <= 227 << 10)
"""


def test_keys_and_values_are_copied_before_the_wait(tmp_path) -> None:
    """In the code for an H200; and two programs fit on an SM, of heads of 64 three."""
    lines = [line.split() for line in run(LAUNCHES, tmp_path).splitlines()]
    assert len(lines) == 6
    # Early: of a thread a key and a value of eight tokens; in FP8 of two or four, and their exponents.
    assert all(line == ["True", "0", "True"] for line in lines), lines


PLANS = """
    import triton_for_sm90
    import torch
    from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
    from ringcore.kernels.attention.decode_tiling import DecodeTiling
    from ringcore.kernels.launch.precompile import intercept_launches

    with intercept_launches() as found:
        for num_seqs, tail_percent in ((8, 0), (200, 10)):
            tiling = DecodeTiling(64, 4, 3, 2, 2, 4, by_warps=True, whole_tiles=3, tail_percent=tail_percent)
            scheduler = DecodeTileScheduler.allocate(32, 8, 128, tiling, torch.device("cpu"), num_programs=264)
            scheduler.plan(*torch.zeros(2, num_seqs, dtype=torch.int32))
    print(len(found))
"""


def test_no_number_of_rows_compiles_a_plan_of_its_own(tmp_path) -> None:
    assert run(PLANS, tmp_path).split() == ["1"]
