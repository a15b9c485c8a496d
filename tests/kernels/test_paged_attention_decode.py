"""The decode kernel against attention sequence by sequence in float32, and its tile scheduler alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from paged_batch import FEATURED, FEATURED_NAMES, PagedBatch, assert_close

from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.page_layout import PageLayout, padded_head_size
from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
from ringcore.kernels.attention.paged_attention_reference import paged_attention_decode_reference
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN, pack_partial

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes the interpreter too long")
# Softcaps and sinks are right where 2^x is infinite, on which numpy, and so the interpreter, remarks.
pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]
# Triton's interpreter multiplies the bits of bfloat16 as integers.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))

SKEWED = [1, 330, 3, 64, 65, 1]


def scheduler_of(
    batch: PagedBatch, num_programs: int | None, window: int | None = None, chunk: int | None = None
) -> DecodeTileScheduler:
    num_seqs, num_heads, head_size = batch.query.shape
    num_kv_heads = PageLayout.of(batch.kv_cache, head_size).num_kv_heads
    tiling = DecodeTiling.choose(num_seqs, max(head_size, batch.v_head_size), batch.query.dtype)
    shape = (num_heads, num_kv_heads, head_size)
    options = {"v_head_size": batch.v_head_size, "window": window, "chunk": chunk, "num_programs": num_programs}
    return DecodeTileScheduler.allocate(*shape, tiling, batch.query.device, **options)


def decode(batch: PagedBatch, tile_scheduler: DecodeTileScheduler, **scores) -> torch.Tensor:
    out = batch.poisoned_out()
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, tile_scheduler, batch.scale)
    assert paged_attention_decode(*inputs, **scores, out=out) is out
    assert (tile_scheduler.partials == UNWRITTEN.value).all(), "the workspace is not reset for the next launch"
    return out


def check(
    lens: list[int],
    num_programs: int | None,
    window: int | None = None,
    *,
    repeats: bool = True,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    **shape,
) -> None:
    """repeats: whether it is launched a second time by the same plan; the interpreter takes its time for that."""
    batch = PagedBatch.make([(1, n) for n in lens], window=window, chunk=chunk, **shape)
    tile_scheduler = scheduler_of(batch, num_programs, window, chunk)
    tile_scheduler.plan(batch.seq_lens)
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None}
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, tile_scheduler, batch.scale)
    expected = paged_attention_decode_reference(*inputs, **scores)
    first = decode(batch, tile_scheduler, **scores)
    assert_close(first, expected)
    if repeats or batch.query.is_cuda:
        assert torch.equal(decode(batch, tile_scheduler, **scores), first), "a plan serves every layer of its step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("block_size", "num_programs"), [(16, 7), (48, 1), (64, 5)])
def test_one_long_sequence_among_short_ones(device, dtype, block_size, num_programs) -> None:
    check(SKEWED, num_programs, device=device, dtype=dtype, block_size=block_size, head_size=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(device, dtype, head_size) -> None:
    check([70, 1, 150], 4, repeats=False, device=device, head_size=head_size, dtype=dtype, block_size=32)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (9, 3), (4, 1), (5, 1), (6, 1), (14, 2), (8, 1), (71, 1)]
)
def test_query_heads_that_share_a_kv_head(device, num_heads, num_kv_heads) -> None:
    check([130, 3], 3, repeats=False, device=device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=16)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 320])
def test_edges_of_blocks_and_tiles(device, seq_len) -> None:
    check([seq_len], 3, repeats=False, device=device, num_heads=2, num_kv_heads=2, head_size=16)


@pytest.mark.parametrize("num_programs", [2, 100])
def test_many_partials_of_one_sequence(device, num_programs) -> None:
    """100: more programs than tiles, more partials than one combine round, and programs without work."""
    check([64 * 35 + 3], num_programs, device=device, num_heads=2, num_kv_heads=1, head_size=16)


@pytest.mark.parametrize("num_programs", [4, 8, 9, 20])
@pytest.mark.parametrize("lens", [[200] * 4, [190, 260, 230, 200], [700, 640], [100, 1, 0, 90]])
def test_sequences_of_about_one_length(device, lens, num_programs) -> None:
    """Split by work item, into one split or several, where there are programs enough."""
    check(lens, num_programs, repeats=num_programs == 8, device=device, num_heads=2, num_kv_heads=2, head_size=16)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 200, 5000])
def test_windows(device, window) -> None:
    check(SKEWED, 5, window, repeats=window == 65, device=device, num_heads=2, num_kv_heads=1, head_size=16)


@pytest.mark.parametrize("chunk", [1, 16, 64, 65, 200, 5000])
def test_chunks(device, chunk) -> None:
    check(SKEWED, 5, chunk=chunk, repeats=chunk == 65, device=device, num_heads=2, num_kv_heads=1, head_size=16)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(("head_size", "v_head_size"), [(24, 16), (16, 40), (192, 128)])
def test_values_of_another_width(device, head_size, v_head_size, block_size) -> None:
    check([70, 1, 150], 4, device=device, head_size=head_size, v_head_size=v_head_size, block_size=block_size)


@pytest.mark.parametrize("num_programs", [1, 7])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_and_sinks(device, softcap, sinks, num_programs) -> None:
    """With 7 programs the items are split: a sink is no part of a partial."""
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16}
    check([130, 3, 0, 330], num_programs, softcap=softcap, sinks=sinks, device=device, **shape)


def test_rows_of_no_tokens_give_zeros(device) -> None:
    """The padding of a batch to a fixed size."""
    check([0, 200, 0, 5, 0, 0], 4, device=device, head_size=16)
    check([0], 4, device=device, head_size=16)


def test_the_next_step_needs_no_more_than_a_plan(device) -> None:
    batches = [PagedBatch.make([(1, n) for n in lens], device=device) for lens in ([300, 2, 80], [5], [64, 640, 1, 9])]
    tile_scheduler = scheduler_of(batches[0], 5)
    for batch in (*batches, batches[0]):
        tile_scheduler.plan(batch.seq_lens)
        tables = (batch.block_table, batch.seq_lens)
        expected = paged_attention_decode_reference(batch.query, batch.kv_cache, *tables, tile_scheduler, batch.scale)
        assert_close(decode(batch, tile_scheduler), expected)


def tiles_of(lens: list[int], tile_scheduler: DecodeTileScheduler) -> list[tuple[int, int, int]]:
    """(sequence, KV head, tile) of every tile, in order."""
    tiles = []
    for sequence, n in enumerate(lens):
        first = (
            0
            if tile_scheduler.window is None
            else max(0, n - tile_scheduler.window) // tile_scheduler.tiling.tile_tokens
        )
        num_tiles = max(1, -(-n // tile_scheduler.tiling.tile_tokens) - first)
        tiles += [(sequence, head, tile) for head in range(tile_scheduler.num_kv_heads) for tile in range(num_tiles)]
    return tiles


TILING = DecodeTiling(tile_tokens=64, num_warps=4, stages=3, programs_per_sm=2, min_tiles=2, partials_per_round=4)


@pytest.mark.parametrize(
    ("num_programs", "window"), [(1, None), (6, 100), (17, None), pytest.param(264, 100, marks=needs_gpu)]
)
@pytest.mark.parametrize(
    "lens",
    [[1], [64, 65, 1], [0, 0, 900], [9000], [5] * 300, [20000, *[130] * 40], [640] * 4, [640, 700, 660], [1280] * 2],
)
@pytest.mark.parametrize("whole_tiles", [0, 3])
def test_the_schedule_is_complete_and_even_or_by_item(device, num_programs, window, lens, whole_tiles) -> None:
    tile_scheduler = DecodeTileScheduler.allocate(
        *(6, 3, 64),
        TILING._replace(whole_tiles=whole_tiles),
        torch.device(device),
        window=window,
        num_programs=num_programs,
    )
    tile_scheduler.tile_ranges.fill_(-1)
    tile_scheduler.plan(torch.tensor(lens, dtype=torch.int32, device=device))
    tiles, at = tiles_of(lens, tile_scheduler), 0
    counts = tile_scheduler.tile_ranges[:, 3].tolist()
    assert sum(counts) == len(tiles)
    used = max(1, min(num_programs, len(tiles) // TILING.min_tiles))
    base = len(tiles) // used
    longest = max(-(-len(tiles) // used), base + min(2, base * 15 // 100))
    lengths = Counter((sequence, head) for sequence, head, _ in tiles)
    num_partials = sum(1 if length <= whole_tiles else -(-length // longest) for length in lengths.values())
    working = [count for count in counts if count]
    assert max(working) <= max(longest, whole_tiles)
    if num_partials <= num_programs:
        assert len(working) == num_partials
    else:
        assert len(working) == used
        assert max(working) - min(working) <= 1
    program_of = [program for program, count in enumerate(counts) for _ in range(count)]
    for sequence, head, tile, count, seq_len, first_program, *_ in tile_scheduler.tile_ranges.tolist():
        if count:
            assert (sequence, head, tile) == tiles[at]
            assert seq_len == lens[sequence]
            assert first_program == program_of[at - tile]
            if num_partials <= num_programs:
                assert tiles[at + count - 1][:2] == (sequence, head), "the range is of one work item"
        else:
            assert seq_len == 0
        at += count


@pytest.mark.parametrize("lens", [[64, 65, 1], [9000], [5] * 300, [20000, *[130] * 40], [640] * 32, [1280, 0, 700]])
@pytest.mark.parametrize("percent", [10, 60])
def test_a_tail_of_ranges_follows_those_of_the_programs_that_run_at_once(device, lens, percent) -> None:
    tiling, num_programs = TILING._replace(tail_percent=percent), 6
    tile_scheduler = DecodeTileScheduler.allocate(6, 3, 64, tiling, torch.device(device), num_programs=num_programs)
    tile_scheduler.tile_ranges.fill_(-1)
    tile_scheduler.plan(torch.tensor(lens, dtype=torch.int32, device=device))
    assert (tile_scheduler.num_programs, tile_scheduler.num_ranges) == (num_programs, 2 * num_programs)
    tiles, at = tiles_of(lens, tile_scheduler), 0
    counts = tile_scheduler.tile_ranges[:, 3].tolist()
    assert sum(counts) == len(tiles)
    by_item = lens == [9000]  # three work items of two splits
    assert set(counts[num_programs:]) == {0 if by_item else len(tiles) // num_programs * percent // 100}
    program_of = [program for program, count in enumerate(counts) for _ in range(count)]
    for sequence, head, tile, count, seq_len, first_program, *_ in tile_scheduler.tile_ranges.tolist():
        if count:
            assert (sequence, head, tile, seq_len) == (*tiles[at], lens[sequence])
            assert first_program == program_of[at - tile]
        at += count


def test_programs_of_the_tail_take_part_in_the_same_contexts(device) -> None:
    batch = PagedBatch.make([(1, n) for n in (700, 2, 0, 900, 65, 3000)], device=device, head_size=64)
    num_heads, num_kv_heads = batch.query.shape[1], batch.kv_cache.shape[2]
    tiling = DecodeTiling.choose(6, 64, batch.query.dtype)._replace(tail_percent=30)
    tile_scheduler = DecodeTileScheduler.allocate(
        num_heads, num_kv_heads, 64, tiling, batch.query.device, num_programs=4
    )
    tile_scheduler.plan(batch.seq_lens)
    assert tile_scheduler.tile_ranges[4:, 3].min() > 0
    tables = (batch.block_table, batch.seq_lens)
    expected = paged_attention_decode_reference(batch.query, batch.kv_cache, *tables, tile_scheduler, batch.scale)
    assert_close(decode(batch, tile_scheduler), expected)


@pytest.mark.parametrize(
    "lens",
    [[70, 1, 300, 0, 0, 0, 0], [5, 0], [0, 0, 0], [9, 10, 0, 16, 0, 0, 23, 0], [0, 0, 0, 70], [300, 0, 300, 0, 0, 300]],
)
@pytest.mark.parametrize("num_programs", [5, 40])
def test_a_plan_that_skips_sequences_of_no_tokens_at_the_end(device, lens, num_programs) -> None:
    """Their rows are not written. Before the last non-empty sequence they give zeros: a stopped row keeps its place,
    and the rows after it decode on."""
    batch = PagedBatch.make([(1, n) for n in lens], device=device, head_size=16)
    tile_scheduler, decoding = (
        scheduler_of(batch, num_programs),
        max((i + 1 for i, n in enumerate(lens) if n), default=0),
    )
    tile_scheduler.plan(torch.nn.functional.pad(batch.seq_lens, (0, 20)), skips_empty=True)
    of_many = tile_scheduler.tile_ranges.clone()
    tile_scheduler.plan(batch.seq_lens, skips_empty=True)  # of few: another variant of the kernel
    assert tile_scheduler.tile_ranges[:, 3].equal(of_many[:, 3])
    assert tile_scheduler.tile_ranges[of_many[:, 3] > 0].equal(of_many[of_many[:, 3] > 0])
    assert tile_scheduler.tile_ranges[:, 3].sum() == len(tiles_of(lens[:decoding], tile_scheduler))
    out = decode(batch, tile_scheduler)
    tables = (batch.block_table, batch.seq_lens)
    expected = paged_attention_decode_reference(batch.query, batch.kv_cache, *tables, tile_scheduler, batch.scale)
    if decoding:
        assert_close(out[:decoding], expected[:decoding])
    assert out[decoding:].isnan().all()


@pytest.mark.parametrize("num_seqs", [1, 3, 32])
@pytest.mark.parametrize(
    ("group", "head_size"), [(1, 16), (1, 64), (1, 128), (2, 80), (2, 128), (4, 128), (7, 64), (128, 256)]
)
def test_each_thread_combines_an_element_or_more_within_its_registers(group, head_size, num_seqs) -> None:
    tiling = DecodeTiling.choose(num_seqs, head_size, torch.bfloat16)
    tile_scheduler = DecodeTileScheduler.allocate(group, 1, head_size, tiling, torch.device("cpu"))
    places = tile_scheduler.combine_rows() * padded_head_size(head_size) // (32 * tiling.num_warps)
    assert places >= 1
    assert tile_scheduler.partials_per_round() >= 1
    assert tile_scheduler.partials_per_round() == 1 or tile_scheduler.partials_per_round() * places <= 32
    assert tile_scheduler.partials_per_round() == tiling.partials_per_round or group == 128


@triton.jit
def _pack(numbers, weights, out):
    index = tl.arange(0, 4)
    tl.store(out + index, pack_partial(tl.load(numbers + index), tl.load(weights + index)))


def test_no_element_equals_the_sentinel(device) -> None:
    bits = torch.tensor([-1, -1, 0x7FC00000, 0x40490FDB], dtype=torch.int32, device=device)
    weights = torch.tensor([-1, 0x3F800000, -1, -0x3FB6F025], dtype=torch.int32, device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    _pack[(1,)](bits.view(torch.float32), weights.view(torch.float32), out)
    assert UNWRITTEN.value not in out.tolist()
    halves = out.view(torch.int32).view(4, 2)
    assert halves[:, 1].equal(weights)
    assert halves[2:, 0].equal(bits[2:])
    assert halves[:2, 0].view(torch.float32).isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF])
def test_numbers_that_look_like_the_sentinel_do_not_hang(device, bits) -> None:
    """NaN is combined like any number, and stays with its sequence."""
    batch = PagedBatch.make([(1, 200), (1, 200)], device=device, head_size=16)
    batch.query.view(torch.int32)[0] = bits
    tile_scheduler = scheduler_of(batch, 5)
    tile_scheduler.plan(batch.seq_lens)
    out = decode(batch, tile_scheduler)
    tables = (batch.block_table, batch.seq_lens)
    expected = paged_attention_decode_reference(batch.query, batch.kv_cache, *tables, tile_scheduler, batch.scale)
    assert out[0].isnan().all()
    assert_close(out[1], expected[1])


@needs_gpu
@pytest.mark.parametrize("num_heads", [32, 64])
def test_more_heads_than_shared_memory_has_room_for_twice(device, num_heads) -> None:
    check([700, 30], None, device=device, num_heads=num_heads, num_kv_heads=1, head_size=256, dtype=torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(16, 8, 128), (32, 8, 64), (8, 1, 256)])
@pytest.mark.parametrize(
    "lens",
    [[131072], [131072, *[100 + i for i in range(255)]], [1 + 7 * i % 1500 for i in range(1024)], [640], [0] * 7 + [9]],
    ids=["long", "skewed", "many", "one", "padded"],
)
@pytest.mark.parametrize("window", [None, 1000])
def test_real_shapes(device, dtype, block_size, num_heads, num_kv_heads, head_size, lens, window) -> None:
    check(
        lens,
        None,
        window,
        device=device,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lens", [[131072], [131072, *[100 + i for i in range(255)]], [640], [1 + 70 * i for i in range(64)]]
)
@pytest.mark.parametrize("shape", FEATURED, ids=[*FEATURED_NAMES])
def test_shapes_of_models_that_ask_for_more(device, dtype, shape, lens) -> None:
    check(lens, None, device=device, dtype=dtype, **shape)


@needs_gpu
def test_a_graph_serves_other_lengths_than_it_was_captured_with(device) -> None:
    shape = {"device": device, "num_heads": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    batch, later = (PagedBatch.make([(1, n) for n in lens], **shape) for lens in ([500] * 8, [1, 4000, 7] + [90] * 5))
    width = max(batch.block_table.shape[1], later.block_table.shape[1])
    table = torch.zeros(8, width, dtype=torch.int32, device=device)
    cache = torch.zeros_like(max(batch.kv_cache, later.kv_cache, key=len))
    lens, query, out = batch.seq_lens.clone(), batch.query.clone(), batch.poisoned_out()
    tile_scheduler = scheduler_of(batch, None)

    def step() -> None:
        tile_scheduler.plan(lens)
        for _ in range(3):
            paged_attention_decode(query, cache, table, lens, tile_scheduler, batch.scale, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in (batch, later, batch):
        table.zero_()
        table[:, : now.block_table.shape[1]] = now.block_table
        cache[: len(now.kv_cache)] = now.kv_cache
        lens.copy_(now.seq_lens)
        query.copy_(now.query)
        out.fill_(torch.nan)
        graph.replay()
        expected = paged_attention_decode_reference(
            now.query, now.kv_cache, now.block_table, now.seq_lens, tile_scheduler, now.scale
        )
        assert_close(out, expected)
