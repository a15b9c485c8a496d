"""Collectives through buffers against sums and concatenations by torch.

Sums of small whole numbers are exact in every format; those of random numbers are rounded once, after float32 (see
`rounding`), whose own error in adding up to five numbers is far below.
"""

from __future__ import annotations

import pytest
import torch
from rank_series import CAPACITY, Call, Ranks
from rounding import rounding

from ringcore.kernels.collectives.all_reduce import all_gather_last_dim_reference, all_reduce, all_reduce_reference
from ringcore.kernels.collectives.peer_buffers import SENTINEL_BYTE, PeerBuffers
from ringcore.kernels.launch.dependent_launch import supports_pdl

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
large = pytest.mark.skipif(not torch.cuda.is_available(), reason="long series take the interpreter minutes")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has neither graphs nor this launch")


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=large)])
def ranks(request, device):
    return Ranks(request.param, device, 64 if device.type == "cuda" else 3)


@pytest.fixture(scope="module")
def pair(device):
    return Ranks(2, device, 5)


def numbers(shape, seed, dtype, whole):
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-20, 21, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def reduction(ranks, shape, seed, dtype=torch.bfloat16, *, residual=None, in_place=False, whole=False):
    """`residual`: its dtype, if there is one. `in_place`: into the residual where there is one, else into the part."""
    shards = [ranks.put(numbers(shape, 100 * seed + rank, dtype, whole)) for rank in range(ranks.size)]
    residuals = None
    if residual is not None:
        residuals = [ranks.put(numbers(shape, 100 * seed + 99, residual, whole)) for _ in range(ranks.size)]
    outs = (residuals or shards) if in_place else [ranks.empty(*shape, dtype=residual or dtype) for _ in shards]
    return Call(False, shards, residuals, outs)


def gathering(ranks, shape, seed, dtype=torch.bfloat16):
    shards = [ranks.put(numbers(shape, 100 * seed + rank, dtype, False)) for rank in range(ranks.size)]
    whole = (*shape[:-1], shape[-1] * ranks.size)
    return Call(True, shards, None, [ranks.empty(*whole, dtype=dtype) for _ in shards])


def expected(call):
    """To be asked for before the call, which may write over its inputs."""
    if call.gathers:
        return all_gather_last_dim_reference(call.shards)
    return all_reduce_reference(call.shards, None if call.residuals is None else call.residuals[0])


def assert_results(call, result):
    first = call.outs[0]
    rtol = 0.0 if call.gathers else rounding(first.dtype, first.device) + torch.finfo(result.dtype).eps + 1e-6
    torch.testing.assert_close(first, result, atol=0 if call.gathers else 1e-6, rtol=rtol)
    for other in call.outs[1:]:
        assert torch.equal(other.view(torch.uint8), first.view(torch.uint8)), "ranks differ"


def run_and_check(ranks, calls, **options):
    results = [expected(call) for call in calls]
    ranks.run(calls, **options)
    for call, result in zip(calls, results, strict=True):
        assert_results(call, result)


SHAPES = [(8,), (1, 1024), (3, 40), (2, 8192), (1, 32760), (5, 3000)]  # bytes up to those of a buffer


def test_sums_of_every_length(ranks):
    calls = []
    for seed in range(2 * len(SHAPES)):
        shape, dtype = SHAPES[seed % len(SHAPES)], DTYPES[(seed + seed // len(SHAPES)) % 3]
        if torch.Size(shape).numel() * dtype.itemsize <= CAPACITY:
            residual = dtype if seed % 2 else None
            calls.append(reduction(ranks, shape, seed, dtype, residual=residual, in_place=seed % 5 < 3))
    run_and_check(ranks, calls)


def test_messages_of_16_bits_with_a_residual_of_32(ranks):
    """Which is rounded as float32 is, and no further: what `assert_results` allows goes by its dtype."""
    calls = []
    for seed, shape in enumerate(SHAPES):
        dtype = DTYPES[seed % 2]
        calls.append(reduction(ranks, shape, seed, dtype, residual=torch.float32, in_place=seed % 3 != 2))
    assert all(call.outs[0].dtype == torch.float32 for call in calls)
    run_and_check(ranks, calls)


def test_whole_numbers_are_summed_exactly(ranks):
    calls = [
        reduction(ranks, (4, 96), seed, dtype, residual=residual, in_place=True, whole=True)
        for seed, (dtype, residual) in enumerate(
            (dtype, residual) for dtype in DTYPES for residual in {None, dtype, torch.float32}
        )
    ]
    results = [expected(call) for call in calls]
    ranks.run(calls)
    for call, result in zip(calls, results, strict=True):
        assert all(torch.equal(out, result) for out in call.outs)


def test_gathered_rows(ranks):
    shapes = [(8,), (1, 24), (5, 520), (2, 3, 8), (1, 16384), (3, 136)]
    run_and_check(ranks, [gathering(ranks, shape, seed, DTYPES[seed % 3]) for seed, shape in enumerate(shapes)])


def test_sizes_and_kinds_in_turn_and_ranks_that_are_late(pair):
    """A call may take either buffer, and any word of it, that another call used before."""
    shapes = [(1, 8), (2, 4096), (1, 1024), (1, 16384), (1, 64), (3, 512)]
    calls = []
    for seed in range(24):
        make = gathering if seed % 5 == 4 else reduction
        calls.append(make(pair, shapes[seed * 7 % len(shapes)], seed))
    run_and_check(pair, calls, delay_s=0.01)


def test_the_shortest_message_after_the_longest(device):
    """The same place is another program's in a message of another length, and may be in the same buffer."""
    capacity = 8 << 20 if device.type == "cuda" else 1 << 18
    ranks = Ranks(2, device, 64 if device.type == "cuda" else 3, capacity)
    calls = []
    for seed, num_bytes in enumerate([capacity, 16, capacity, 4096, 16, capacity, capacity - 16, 48, capacity]):
        dtype = DTYPES[seed % 3]
        shape = (1, num_bytes // dtype.itemsize)
        calls.append(reduction(ranks, shape, seed, dtype, residual=torch.float32, in_place=True))
    run_and_check(ranks, calls, delay_s=0.002)


def test_a_rank_that_is_ahead_overwrites_nothing(device):
    """A rank that comes late sends all its tiles before it reads the first: the others are a call ahead by then."""
    ranks = Ranks(2, device, 1)
    run_and_check(ranks, [reduction(ranks, (1, CAPACITY // 2), seed) for seed in range(8)], delay_s=0.05)


@large
def test_a_thousand_calls(ranks):
    shapes = [(1, 8), (2, 4096), (1, 1024), (1, 16384), (1, 64), (3, 512)]
    residuals = (torch.bfloat16, None, torch.float32)
    calls = [reduction(ranks, shapes[seed * 7 % 6], seed, residual=residuals[seed % 3]) for seed in range(1000)]
    run_and_check(ranks, calls, delay_s=0.0002, pdl=supports_pdl(ranks.device))


@on_gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_counts_its_calls(ranks, pdl):
    """Replays, with eager calls between, over an odd number of calls: each replay begins with the other buffer."""
    if pdl and not supports_pdl(ranks.device):
        pytest.skip("this GPU has no dependent launch")
    calls = [
        reduction(ranks, (1, 4096), 1),
        gathering(ranks, (2, 1024), 2),
        reduction(ranks, (2, 2048), 3, residual=torch.float32),
    ]
    results = [expected(call) for call in calls]
    ranks.run(calls, pdl=pdl)  # compiles, which a capture cannot
    graphs = ranks.capture(calls, pdl=pdl)
    for _ in range(7):
        for call in calls:
            for out in call.outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        ranks.replay(graphs)
        for call, result in zip(calls, results, strict=True):
            assert_results(call, result)
        run_and_check(ranks, [reduction(ranks, (1, 512), 4)], pdl=pdl)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_arrives_and_ends_no_call(pair, dtype):
    """Among them the one with the bits of the sentinel."""
    call, gather = reduction(pair, (1, 32), 1, dtype), gathering(pair, (1, 32), 2, dtype)
    for one in (call, gather):
        one.shards[0].view(torch.uint8)[0, :8] = SENTINEL_BYTE
        one.shards[1][0, 12] = float("nan")
        one.shards[1][0, 13] = float("inf")
        one.shards[0][0, 14] = -0.0
        one.shards[1][0, 14] = -0.0
    streams = [pair.put(torch.zeros(1, 32)) for _ in range(2)]
    wide = Call(False, call.shards, streams, streams)
    pair.run([call, gather, wide])
    empty = 8 // dtype.itemsize
    sums = torch.stack([part.float() for part in call.shards]).sum(0)
    nans = torch.zeros(32, dtype=torch.bool)
    nans[:empty], nans[12] = True, True
    for rank in range(2):
        assert torch.equal(call.outs[rank][0].isnan().cpu(), nans)
        assert call.outs[rank][0, 13] == float("inf")
        torch.testing.assert_close(call.outs[rank].float(), sums, atol=1e-6, rtol=2e-2, equal_nan=True)
        torch.testing.assert_close(wide.outs[rank], sums, atol=1e-6, rtol=1e-6, equal_nan=True)
        shards = torch.cat(gather.shards, dim=-1)
        assert torch.equal(gather.outs[rank].nan_to_num(7.0), shards.nan_to_num(7.0))
        assert gather.outs[rank].isnan().sum() == empty + 1


def test_what_can_be_a_message(pair):
    buffers = pair.buffers[0]
    for shape, dtype, fits, fits_rows in [
        ((1, 8), torch.bfloat16, True, True),
        ((2, 4), torch.bfloat16, True, False),
        ((2, 4), torch.float32, True, True),
        ((1, 7), torch.bfloat16, False, False),
        ((0, 8), torch.bfloat16, False, False),
        ((1, 8), torch.int64, False, False),
        ((1, CAPACITY // 4), torch.float32, True, True),
        ((2, CAPACITY // 4), torch.float32, False, False),
    ]:
        tensor = torch.empty(shape, dtype=dtype, device=pair.device)
        assert (buffers.fits(tensor), buffers.fits_rows(tensor)) == (fits, fits_rows), (shape, dtype)


def test_tensors_must_be_contiguous(pair):
    wide = pair.empty(4, 32, dtype=torch.float32)
    with pytest.raises(AssertionError, match="contiguous"):
        all_reduce(wide[:, :16], pair.buffers[0], out=wide[:, :16])
    apart = pair.empty(9, dtype=torch.float32)[1:]
    with pytest.raises(AssertionError, match="multiple of 16"):
        all_reduce(apart, pair.buffers[0], out=apart)


def test_dtypes_that_do_not_go_together(pair):
    part, wide = pair.empty(1, 32, dtype=torch.bfloat16), pair.empty(1, 32, dtype=torch.float32)
    other = pair.empty(1, 32, dtype=torch.float16)
    for partial, out, residual in [(part, wide, None), (part, wide, part), (wide, part, part), (part, other, other)]:
        with pytest.raises(AssertionError, match=r"torch\.float"):
            all_reduce(partial, pair.buffers[0], out=out, residual=residual)


def test_memory_of_a_rank():
    assert PeerBuffers.num_bytes(4, 1024) == 8 * 1024
