"""KV in FP8: every writer stores the same bytes, and attention reads them as the reference does.

Bytes are compared with `fp8_rows`, attention with the reference over expanded keys and values: rounding to FP8 is in
both, so the tolerances are those of the model's dtype.
"""

from __future__ import annotations

import pytest
import torch
from paged_batch import PagedBatch, assert_close, in_fp8
from test_paged_attention_decode import decode, scheduler_of
from test_precompile import run

from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.fp8_rows import from_rows, largest_number, rounded, to_rows
from ringcore.kernels.attention.kv_write import kv_write, kv_write_reference
from ringcore.kernels.attention.page_layout import PageLayout, padded_head_size
from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
from ringcore.kernels.attention.paged_attention_reference import (
    paged_attention_decode_reference,
    paged_attention_prefill_reference,
)
from ringcore.kernels.attention.prompt_padding import gather_padded_kv, gather_padded_kv_reference
from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope

pytestmark = pytest.mark.sampled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="takes the interpreter too long")


def numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Heads of very different sizes, of which one is zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = torch.randn(*shape[:-1], 1, generator=generator).mul(4).exp2()
    found = torch.randn(*shape, generator=generator) * sizes
    found[0, 0] = 0.0
    return found.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_its_numbers_to_four_bits(dtype):
    given = numbers(300, 3, 64, dtype=dtype, device=torch.device("cpu")).double()
    read = rounded(given.to(dtype)).double()
    largest = given.abs().amax(-1, keepdim=True)
    # Half a unit of a mantissa of 3 bits; below 2^-6 of a code half of its smallest number, 2^-9.
    bound = torch.maximum(given.abs() / 16, largest / 224 / 2**10)
    assert ((read - given).abs() <= bound * 1.0001).all()
    assert torch.equal(rounded(read.to(dtype)), read.to(dtype)), "what was read is stored as it is"
    codes = to_rows(given.to(dtype))[..., :-1].view(torch.float8_e4m3fn).float().abs().amax(-1)
    assert ((codes > 208) | (codes == 0)).all(), "a smaller power of 2 would do"
    assert not from_rows(torch.zeros(2, 65, dtype=torch.uint8), dtype).any(), "what was never written is zeros"


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_are_stored_as_finite_ones(device, dtype):
    given = torch.tensor([[torch.inf, 0.0], [-torch.inf, torch.nan], [torch.finfo(dtype).max, 0.0]]).to(dtype)
    bound = largest_number(dtype)
    assert rounded(given).tolist() == [[bound, 0.0], [-bound, 0.0], [bound, 0.0]]
    wide = given.repeat(1, 8)[:, None].to(device)  # [3, 1, 16]
    pages = torch.zeros(PageLayout.shape(2, 1, 16, 16, 16, True), dtype=torch.uint8, device=device)
    expected, slots = pages.clone(), torch.arange(16, 19, device=device)
    kv_write(wide, wide, pages, slots)
    kv_write_reference(wide, wide, expected, slots)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size"), [(4, 2, 64, 16), (3, 3, 80, 32)])
def test_every_writer_stores_the_same_bytes(device, dtype, heads, kv_heads, head_size, block_size):
    n, num_all = 5, heads + 2 * kv_heads
    qkv = numbers(n, num_all, head_size, dtype=dtype, device=device).flatten(1)
    angles = torch.randn(n, head_size // 2, generator=torch.Generator().manual_seed(1))
    cos_sin = torch.stack((angles.cos(), angles.sin()), -1).flatten(1).to(device)
    shape = PageLayout.shape(4, kv_heads, block_size, head_size, head_size, True)
    generator = torch.Generator().manual_seed(2)
    pages = torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(device)
    by_kernel, by_reference = pages.clone(), pages.clone()
    slots = (torch.randperm(3 * block_size, generator=generator)[:n] + block_size).to(device)
    qk_norm_rope(qkv, None, cos_sin, heads, kv_heads, kv_cache=pages, slot_mapping=slots)
    _, key, value = qkv.view(n, num_all, head_size).split([heads, kv_heads, kv_heads], 1)
    kv_write(key, value, by_kernel, slots)
    kv_write_reference(key, value, by_reference, slots)
    assert torch.equal(by_kernel, by_reference)
    assert torch.equal(pages, by_reference)
    page = PageLayout.of(pages, head_size)
    token = torch.arange(n, device=device)
    for kind, given in zip(page.read(pages, slots // block_size, dtype), (key, value), strict=True):
        assert torch.equal(kind[token, :, slots % block_size], rounded(given))
    gathered = gather_padded_kv(pages, slots, n, 8, dtype)
    for found, expected in zip(gathered, gather_padded_kv_reference(pages, slots, n, 8, dtype), strict=True):
        assert torch.equal(found, expected)


def check_decode(lens, num_programs, *, window=None, softcap=None, sinks=False, **shape):
    batch = in_fp8(PagedBatch.make([(1, n) for n in lens], window=window, **shape))
    tile_scheduler = scheduler_of(batch, num_programs, window)
    tile_scheduler.plan(batch.seq_lens)
    scores = {"softcap": softcap, "sinks": batch.sinks if sinks else None}
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, tile_scheduler, batch.scale)
    assert_close(decode(batch, tile_scheduler, **scores), paged_attention_decode_reference(*inputs, **scores))


# bfloat16 too: codes are multiplied in float16, which the interpreter can.
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"head_size": 128, "block_size": 16}),
        (torch.bfloat16, {"head_size": 80, "block_size": 32, "window": 70, "sinks": True}),
        (torch.float16, {"head_size": 64, "block_size": 64, "softcap": 3.0, "num_heads": 14}),
        (torch.float16, {"head_size": 64, "block_size": 128}),
        (torch.float32, {"head_size": 64, "block_size": 16}),
    ],
    ids=str,
)
def test_decodes(device, dtype, options):
    check_decode([150, 1, 40], 3, device=device, dtype=dtype, **options)


@pytest.mark.parametrize("head_size", [64, 128])
def test_values_of_very_different_sizes(device, head_size):
    """In one tile: zeros, whose exponent is the smallest, and some whose weights are large by comparison."""
    batch = PagedBatch.make([(1, 33)], device=device, dtype=torch.bfloat16, head_size=head_size)
    values = PageLayout.of(batch.kv_cache, head_size).split(batch.kv_cache)[1]
    values[batch.block_table[0, 0], :, :8] = 0.0
    values[batch.block_table[0, 1]] *= 2.0**-40
    values[batch.block_table[0, 2]] *= 2.0**20
    in_fp8(batch)
    tile_scheduler = scheduler_of(batch, 2)
    tile_scheduler.plan(batch.seq_lens)
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, tile_scheduler, batch.scale)
    expected = paged_attention_decode_reference(*inputs)
    assert_close(decode(batch, tile_scheduler) / 2**20, expected / 2**20)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"head_size": 64, "block_size": 16, "window": 20}),
        (torch.float32, {"head_size": 32, "block_size": 48}),
    ],
    ids=str,
)
def test_chunks(device, dtype, options):
    check_prefill([(1, 70), (20, 33), (5, 5)], device=device, dtype=dtype, **options)


def check_prefill(lens, *, window=None, **shape):
    batch = in_fp8(PagedBatch.make(lens, window=window, **shape))
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.scale)
    options = {"max_query_len": max(n for n, _ in lens), "window": window}
    out = batch.poisoned_out()
    paged_attention_prefill(*inputs, **options, out=out)
    assert_close(out, paged_attention_prefill_reference(*inputs, **options))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (64, 8, 64), (8, 4, 256), (5, 5, 96)], ids=str
)
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_on_a_gpu(device, dtype, heads, block_size):
    num_heads, num_kv_heads, head_size = heads
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "block_size": block_size}
    lens = torch.randint(1, 3000, (40,), generator=torch.Generator().manual_seed(num_heads)).tolist()
    for seqs, window in ((lens, None), (lens[:3], None), (lens, 200)):
        check_decode(seqs, None, window=window, device=device, dtype=dtype, **shape)
    chunks = [(min(n, 1 + 300 * (i % 2)), n) for i, n in enumerate(lens[:8])]
    for window in (None, 200):
        check_prefill(chunks, window=window, device=device, dtype=dtype, **shape)


@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("num_seqs", [1, 8, 256])
def test_tiles_of_fp8_fit_into_shared_memory(head_size, num_seqs):
    """All programs of a multiprocessor with their stages of keys, values and exponents, and what a warp multiplies."""
    tiling, width = DecodeTiling.choose(num_seqs, head_size, torch.uint8), padded_head_size(head_size)
    assert tiling.tile_tokens % 16 == 0
    assert width >= 4 * tiling.num_warps
    stored = tiling.programs_per_sm * (tiling.stages - 1) * tiling.tile_tokens * 2 * (width + 4)
    assert stored <= 150 << 10


@pytest.mark.long_form
def test_they_are_compiled_for_a_gpu(tmp_path):
    """What the interpreter lets pass, the compiler may not. In a separate process, where Triton does not interpret."""
    script = """
        import torch, triton_for_sm90
        from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
        from ringcore.kernels.attention.decode_tiling import DecodeTiling
        from ringcore.kernels.attention.kv_write import kv_write
        from ringcore.kernels.attention.page_layout import PageLayout, padded_head_size
        from ringcore.kernels.attention.paged_attention_decode import paged_attention_decode
        from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
        from ringcore.kernels.launch.precompile import compile_variants, intercept_launches
        from ringcore.kernels.attention.prompt_padding import gather_padded_kv
        from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope

        cpu, dtype = torch.device("cpu"), torch.bfloat16
        ints, slots = torch.zeros(9, 4, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
        with intercept_launches() as intercepted:
            for head_size in (64, 128):
                pages = torch.zeros(PageLayout.shape(4, 2, 16, head_size, head_size, True), dtype=torch.uint8)
                query = torch.zeros(8, 4, head_size, dtype=dtype)
                qkv = torch.zeros(8, 8 * head_size, dtype=dtype)
                tiling = DecodeTiling.choose(8, head_size, torch.uint8)
                scheduler = DecodeTileScheduler.allocate(4, 2, head_size, tiling, cpu, num_programs=4)
                paged_attention_decode(query, pages, ints[:8], ints[:8, 0], scheduler, 1.0)
                paged_attention_prefill(query, pages, ints[:8], ints[:8, 0], ints[:, 0], 1.0, max_query_len=512)
                kv_write(query[:, :2], query[:, :2], pages, slots)
                gather_padded_kv(pages, slots, 8, 16, dtype)
                qk_norm_rope(qkv, slots, torch.zeros(4, head_size), 4, 2, kv_cache=pages, slot_mapping=slots)
        compile_variants(list(intercepted.values()), cpu, 2)
        print(len(intercepted))
    """
    assert run(script, tmp_path) == "10\n"
