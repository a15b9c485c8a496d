"""The prefill kernel against attention sequence by sequence in float32."""

from __future__ import annotations

import pytest
import torch
from paged_batch import FEATURED, FEATURED_NAMES, PagedBatch, assert_close

from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
from ringcore.kernels.attention.paged_attention_reference import paged_attention_prefill_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes the interpreter too long")
# Softcaps and sinks are right where 2^x is infinite, on which numpy, and so the interpreter, remarks.
pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]
# Triton's interpreter multiplies the bits of bfloat16 as integers.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))

MIXED = [(1, 40), (5, 5), (11, 27), (0, 0), (70, 70), (1, 1), (2, 50), (33, 100)]


def check(batch: PagedBatch, max_query_len: int, window: int | None = None, **features) -> None:
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.scale)
    options = {"max_query_len": max_query_len, "window": window, **features}
    out = batch.poisoned_out()
    expected = paged_attention_prefill_reference(*inputs, **options)
    assert paged_attention_prefill(*inputs, **options, out=out) is out
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_prompts_chunks_and_single_tokens_mixed(device, dtype, block_size) -> None:
    check(PagedBatch.make(MIXED, device=device, dtype=dtype, block_size=block_size), 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("head_size", [16, 80, 96, 128, 256])
def test_head_sizes(device, dtype, head_size) -> None:
    lens = [(30, 70), (1, 17)]
    check(PagedBatch.make(lens, device=device, head_size=head_size, dtype=dtype, block_size=32), 30)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (9, 3), (4, 1), (5, 1), (6, 1), (14, 2), (8, 1), (71, 1)]
)
def test_query_heads_that_share_a_kv_head(device, num_heads, num_kv_heads) -> None:
    lens = [(40, 55), (1, 3)]
    check(PagedBatch.make(lens, device=device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=16), 40)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96])
def test_edges_of_blocks_and_tiles(device, seq_len) -> None:
    lens = [(seq_len, seq_len), (1, seq_len), ((seq_len + 1) // 2, seq_len)]
    check(PagedBatch.make(lens, device=device, num_heads=1, num_kv_heads=1, head_size=16), seq_len)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 64, 80, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_windows(device, window, dtype) -> None:
    lens = [(1, 150), (45, 200), (90, 90), (3, 64)]
    batch = PagedBatch.make(lens, device=device, num_heads=2, num_kv_heads=1, head_size=16, dtype=dtype, window=window)
    check(batch, 90, window)


@pytest.mark.parametrize("chunk", [1, 16, 33, 80, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_chunks(device, chunk, dtype) -> None:
    lens = [(1, 150), (45, 200), (90, 90), (3, 64)]
    batch = PagedBatch.make(lens, device=device, num_heads=2, num_kv_heads=1, head_size=16, dtype=dtype, chunk=chunk)
    check(batch, 90, chunk=chunk)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(("head_size", "v_head_size"), [(24, 16), (16, 40), (192, 128)])
def test_values_of_another_width(device, head_size, v_head_size, block_size) -> None:
    shape = {"head_size": head_size, "v_head_size": v_head_size, "block_size": block_size}
    check(PagedBatch.make([(30, 70), (1, 17)], device=device, **shape), 30)


@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcaps_and_sinks(device, softcap, has_sinks) -> None:
    batch = PagedBatch.make([(30, 70), (1, 17)], device=device, num_heads=6, head_size=16)
    check(batch, 30, softcap=softcap, sinks=batch.sinks if has_sinks else None)


def test_sinks_that_are_not_finite(device) -> None:
    """One that nothing flows into, and one that all flows into."""
    batch = PagedBatch.make([(5, 40)], device=device, head_size=16)
    batch.sinks[0], batch.sinks[1] = -torch.inf, 1e4
    check(batch, 5, sinks=batch.sinks)


def test_a_bound_above_the_longest_query(device) -> None:
    check(PagedBatch.make(MIXED, device=device, head_size=16), 4096)


def test_rows_behind_the_last_sequence_are_left_alone(device) -> None:
    """A batch that is padded to a fixed size has tokens of no sequence, and sequences without tokens."""
    batch = PagedBatch.make([(3, 20), (4, 4), (0, 0), (0, 0)], device=device, head_size=16)
    query = torch.cat((batch.query, torch.full_like(batch.query[:5], torch.nan)))
    out = torch.full(query.shape, torch.nan, device=device)
    tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    paged_attention_prefill(query, batch.kv_cache, *tables, batch.scale, max_query_len=4, out=out)
    expected = paged_attention_prefill_reference(batch.query, batch.kv_cache, *tables, batch.scale, max_query_len=4)
    assert_close(out[:7], expected)
    assert out[7:].isnan().all()


def test_the_first_sequence_may_begin_anywhere(device) -> None:
    """The tokens before it belong to sequences that are attended elsewhere, and have none here."""
    batch = PagedBatch.make([(0, 0), (0, 9), (40, 60), (3, 3), (0, 0)], device=device, head_size=16)
    before = 37
    query = torch.cat((torch.full_like(batch.query[:1], torch.nan).expand(before, -1, -1), batch.query))
    out = torch.full(query.shape, torch.nan, device=device)
    tables = (batch.block_table, batch.seq_lens)
    starts = batch.query_start_loc + before
    paged_attention_prefill(query, batch.kv_cache, *tables, starts, batch.scale, max_query_len=99, out=out)
    expected = paged_attention_prefill_reference(
        batch.query, batch.kv_cache, *tables, batch.query_start_loc, batch.scale, max_query_len=40
    )
    assert_close(out[before:], expected)
    assert out[:before].isnan().all()


def test_more_sequences_than_are_searched_at_once(device) -> None:
    lens = [(1, 1 + i % 3) for i in range(130)]
    check(PagedBatch.make(lens, device=device, num_heads=1, num_kv_heads=1, head_size=16), 1)


def test_a_number_that_is_not_finite_is_not_lost(device) -> None:
    """It belongs to one sequence, and stays in it."""
    batch = PagedBatch.make([(6, 20), (4, 4)], device=device, head_size=16)
    batch.query[2] = torch.nan
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.scale)
    out = paged_attention_prefill(*inputs, max_query_len=6)
    assert out[2].isnan().all()
    expected = paged_attention_prefill_reference(*inputs, max_query_len=6)
    others = [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert_close(out[others], expected[others])


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(16, 8, 128), (32, 8, 64), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 1024])
def test_real_shapes(device, dtype, block_size, num_heads, num_kv_heads, head_size, window) -> None:
    lens = [(2048, 2048), (1, 5000), (700, 9000), (1, 1), (513, 513), *[(1, 300 + i) for i in range(60)], (1000, 1001)]
    batch = PagedBatch.make(
        lens,
        device=device,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        window=window,
    )
    check(batch, 2048, window)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", FEATURED, ids=[*FEATURED_NAMES])
def test_shapes_of_models_that_ask_for_more(device, dtype, shape) -> None:
    shape = dict(shape)
    features = {name: shape.pop(name) for name in ("softcap", "sinks") if name in shape}
    lens = [(2048, 2048), (1, 5000), (700, 9000), (1, 1), (513, 513), *[(1, 300 + i) for i in range(60)], (1000, 1001)]
    batch = PagedBatch.make(lens, device=device, dtype=dtype, **shape)
    options = {"window": shape.get("window"), "chunk": shape.get("chunk"), "softcap": features.get("softcap")}
    check(batch, 2048, **options, sinks=batch.sinks if "sinks" in features else None)


@needs_gpu
def test_a_context_of_131072_tokens(device) -> None:
    """Its last queries, in the tiles of a prompt that is as long: all of it would take the reference 500 GiB."""
    batch = PagedBatch.make(
        [(100, 131072), (100, 100)], device=device, num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16
    )
    check(batch, 131072)
