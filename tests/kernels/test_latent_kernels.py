"""The kernels of latent attention against their references."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.attention.latent_attention_decode import (
    latent_attention_decode,
    latent_attention_decode_reference,
    latent_tile_scheduler,
)
from ringcore.kernels.attention.latent_rows import (
    latent_rows,
    latent_rows_reference,
    rotate_heads,
    rotate_heads_reference,
)
from ringcore.kernels.attention.split_kv_combine import UNWRITTEN

pytestmark = pytest.mark.sampled

large = pytest.mark.skipif(not torch.cuda.is_available(), reason="large shapes take the interpreter minutes")
# Triton's interpreter multiplies the bits of bfloat16 as integers.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
# As for paged attention with heads: see `paged_batch`.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def angles(n: int, size: int, device: torch.device) -> torch.Tensor:
    turns = randn(n, size // 2, seed=1, device=device) * 10
    return torch.stack((turns.cos(), turns.sin()), 2).flatten(1).contiguous()


# Rows and rotations.


def assert_close(ours: torch.Tensor, right: torch.Tensor) -> None:
    """Both are rounded once; float32 sums in another order may round to the number beside."""
    torch.testing.assert_close(ours, right, atol=4e-6, rtol=torch.finfo(ours.dtype).eps + 4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "rank", "rope"), [(3, 16, 8), (2, 24, 6), (1, 512, 64), pytest.param(4096, 512, 64, marks=large)]
)
def test_rows_are_normalised_rotated_and_written(device, n, rank, rope, dtype):
    block_size = 4
    wide = randn(n, rank + rope + 5, seed=2, device=device, dtype=dtype)
    compressed, gain = wide[:, 5:], randn(rank, seed=3, device=device).abs() + 0.5
    slots = torch.randperm(n + 9, generator=torch.Generator().manual_seed(4))[:n].to(device)
    pages = torch.full((-(-(n + 9) // block_size), block_size, rank + rope), torch.nan, dtype=dtype, device=device)
    others, before = pages.clone(), compressed.clone()
    rows = latent_rows(compressed, gain, 1e-6, angles(n, rope, device), pages, slots)
    right = latent_rows_reference(compressed, gain, 1e-6, angles(n, rope, device), others, slots)
    assert_close(rows, right)
    assert torch.equal(pages.flatten(0, 1)[slots], rows)
    assert torch.equal(pages.isnan(), others.isnan()), "other slots are not written"
    assert torch.equal(compressed, before)
    assert torch.equal(latent_rows(compressed, gain, 1e-6, angles(n, rope, device)), rows)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_row_that_overflows_float16_is_written_as_a_finite_one(device):
    compressed, gain = torch.ones(1, 24, device=device).half(), torch.full((16,), 1e6, device=device)
    compressed[0, 16:] = torch.tensor([torch.inf, 1, torch.nan, 1, 1, 1, 1, 1])
    pages = torch.zeros(1, 4, 24, dtype=torch.float16, device=device)
    slots = torch.tensor([2], device=device)
    rows = latent_rows(compressed, gain, 1e-6, angles(1, 8, device), pages, slots)
    assert not rows.isfinite().all()
    assert pages.isfinite().all()
    assert (pages[0, 2, :16] == torch.finfo(torch.float16).max).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "heads", "size"), [(3, 5, 8), (2, 40, 6), (1, 1, 64), pytest.param(700, 128, 64, marks=large)]
)
def test_the_ends_of_heads_are_rotated_in_place(device, n, heads, size, dtype):
    query = randn(n, heads, size + 10, seed=5, device=device, dtype=dtype)
    right = query.clone()
    rotate_heads(query[..., 10:], angles(n, size, device))
    rotate_heads_reference(right[..., 10:], angles(n, size, device))
    assert torch.equal(query[..., :10], right[..., :10])
    assert_close(query, right)


# Decoding.


def check(
    device: torch.device,
    lens: list[int],
    num_programs: int | None,
    num_heads: int = 4,
    rank: int = 16,
    rope: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """In every slot that nothing may read lies NaN."""
    needed = [-(-n // block_size) for n in lens]
    ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).to(device, torch.int32) + 1
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32, device=device)
    pages = torch.full((sum(needed) + 1, block_size, rank + rope), torch.nan, dtype=dtype, device=device)
    for row, blocks, n in zip(table, ids.split(needed), lens, strict=True):
        row[: len(blocks)] = blocks
        places = torch.arange(n, device=device)
        slots = row[places // block_size].long() * block_size + places % block_size
        pages.flatten(0, 1)[slots] = randn(n, rank + rope, seed=n, device=device, dtype=dtype)
    query = randn(len(lens), num_heads, rank, seed=6, device=device, dtype=dtype)
    rotated = randn(len(lens), num_heads, rope + 3, seed=7, device=device, dtype=dtype)[..., 3:]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    scheduler = latent_tile_scheduler(num_heads, rank, rope, dtype, device, num_programs)
    scheduler.plan(seq_lens)
    inputs = (query, rotated, pages, table, seq_lens, scheduler, (rank + rope) ** -0.5)
    ours = latent_attention_decode(*inputs)
    assert (scheduler.partials == UNWRITTEN.value).all(), "the workspace is not reset for the next launch"
    assert (ours.float() - latent_attention_decode_reference(*inputs).float()).abs().max() <= TOLERANCE[dtype]
    assert torch.equal(latent_attention_decode(*inputs), ours), "a plan serves every layer of its step"


SKEWED = [1, 330, 3, 64, 65, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("block_size", "num_programs"), [(16, 7), (48, 1), (64, 5)])
def test_one_long_sequence_among_short_ones(device, block_size, num_programs, dtype):
    check(device, SKEWED, num_programs, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("num_programs", [2, 40])
def test_many_partials_of_one_sequence(device, num_programs):
    """40: of two tiles a partial or more, so that some have no work, and a combine of several rounds."""
    check(device, [64 * 25 + 3], num_programs)


@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(1, 16, 8), (9, 24, 6), (40, 16, 8), (34, 32, 16), (8, 80, 2)])
def test_sizes_and_heads_of_several_work_items(device, num_heads, rank, rope):
    """In float32 up to 16 heads are of one: 40 are four of 10. 34 are 17 of two, since 17 are too many."""
    check(device, [70, 1, 150], 4, num_heads, rank, rope)


@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(128, 512, 64), (16, 512, 64), (40, 256, 32), (20, 512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@large
def test_published_sizes(device, num_heads, rank, rope, dtype):
    check(device, [3000, 1, 700, 90], None, num_heads, rank, rope, 64, dtype)
