"""What a communicator sends through buffers, and how it copes with tensors that begin anywhere."""

from __future__ import annotations

import pytest
import torch
from rank_series import in_processes, shared

from ringcore.distributed.combine import PeerCombine
from ringcore.distributed.communicator import NcclCommunicator, PeerCollectives
from ringcore.distributed.peer_memory import PeerMemory
from ringcore.kernels.collectives.combine import combine_reference
from ringcore.kernels.collectives.peer_buffers import PeerBuffers

CPU = torch.device("cpu")
SIZE = 2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there, ranks have a GPU each: tests/gpu")


@pytest.fixture(scope="module")
def ranks():
    num_bytes = PeerBuffers.num_bytes(SIZE, PeerCollectives.capacity_bytes(SIZE))
    memory = [shared(num_bytes, CPU) for _ in range(SIZE)]
    addresses = [one.data_ptr() for one in memory]
    yield [PeerCollectives(PeerMemory(None, rank, addresses), rank, CPU) for rank in range(SIZE)]
    del memory  # mapped until here


def part(rank, length):
    """[1, length], begun 8 bytes after a multiple of 16."""
    values = torch.arange(length + 4) * (rank + 1) % 13
    return values.bfloat16()[None, 4:]


def test_tensors_that_begin_between_two_multiples(ranks):
    totals, outs = part(0, 64) + part(1, 64), shared(3 * SIZE * 128, CPU).view(torch.bfloat16).view(3, SIZE, 64)
    gathered = shared(SIZE * 256, CPU).view(torch.bfloat16).view(SIZE, 128)

    def work(rank):
        peers = ranks[rank]
        assert peers.can_reduce(part(rank, 64))
        assert peers.can_gather(part(rank, 64))
        outs[0, rank] = peers.all_reduce(part(rank, 64))
        residual = torch.full((1, 68), 5.0).bfloat16()
        unaligned, aligned = residual[:, 4:], residual[:, :64].clone()
        assert peers.all_reduce(part(rank, 64), unaligned) is unaligned
        assert peers.all_reduce(part(rank, 64), aligned) is aligned
        outs[1, rank], outs[2, rank] = unaligned, aligned
        gathered[rank] = peers.all_gather_last_dim(part(rank, 64))

    in_processes(SIZE, work, 60)
    for rank in range(SIZE):
        assert torch.equal(outs[0, rank], totals[0])
        assert torch.equal(outs[1, rank], totals[0] + 5)
        assert torch.equal(outs[2, rank], totals[0] + 5)
        assert torch.equal(gathered[rank], torch.cat([part(0, 64), part(1, 64)], dim=-1)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_goes_into_the_float32_stream_without_nccl(ranks, dtype):
    """In one kernel, without the process group. An unaligned residual takes two kernels."""
    parts = [part(rank, 64).to(dtype) for rank in range(SIZE)]
    streams = shared(SIZE * 2 * 272, CPU).view(torch.float32).view(SIZE, 2, 68)
    streams.fill_(1 / 3)

    def work(rank):
        tp = NcclCommunicator._of(rank, SIZE, object(), ranks[rank])
        tp.all_reduce_add(parts[rank].clone(), streams[rank, :1, :64])
        tp.all_reduce_add(parts[rank].clone(), streams[rank, 1:, 2:66])

    in_processes(SIZE, work, 60)
    total = torch.stack([one.float() for one in parts]).sum(0) + 1 / 3
    for rank in range(SIZE):
        assert torch.equal(streams[rank, :1, :64], total)
        assert torch.equal(streams[rank, 1:, 2:66], total)


def test_which_sums_go_with_which_residual(ranks):
    peers, part = ranks[0], torch.empty(1024, 4096, dtype=torch.bfloat16)
    assert peers.can_add(part, part)
    assert peers.can_add(part, part.float())
    assert not peers.can_add(part, part.half())
    assert not peers.can_add(part, torch.empty(1024, 4100)[:, :4096])
    assert not peers.can_add(part[:64].float(), part[:64])
    longer = torch.empty(1025, 4096, dtype=torch.bfloat16)
    assert not peers.can_add(longer, longer.float())


@pytest.mark.parametrize(
    ("size", "reduced", "capacity"),
    [(2, 8 << 20, 8 << 20), (3, 4 << 20, 4 << 20), (4, 2796192, 2796192), (8, 1198368, 2 << 20)],
)
def test_the_longest_sum_by_the_number_of_ranks(size, reduced, capacity):
    """What a rank sends to all others is the same, within a multiple of 16 bytes to each."""
    assert PeerCollectives.max_reduced_bytes(size) == reduced
    assert PeerCollectives.capacity_bytes(size) == capacity


@pytest.mark.parametrize(
    ("shape", "dtype", "reduces", "gathers"),
    [
        ((256, 4096), torch.bfloat16, True, True),
        ((257, 4096), torch.bfloat16, True, False),
        ((1024, 4096), torch.bfloat16, True, False),
        ((1025, 4096), torch.bfloat16, False, False),
        ((513, 4096), torch.float32, False, False),
        ((1, 75968), torch.float32, True, True),
        ((1, 12), torch.bfloat16, False, False),
        ((1, 8), torch.int32, False, False),
    ],
)
def test_what_goes_to_nccl_is_a_matter_of_shape(ranks, shape, dtype, reduces, gathers):
    tensor = torch.empty(shape, dtype=dtype)
    assert (ranks[0].can_reduce(tensor), ranks[0].can_gather(tensor)) == (reduces, gathers)


def test_more_tokens_than_the_buffers_hold_are_combined_in_several_launches(monkeypatch):
    """By the communicator, which decides by the bytes; hidden sizes that no launch takes are NCCL's."""
    monkeypatch.setattr(PeerCombine, "_ROWS_BYTES", 1 << 12)
    num_bytes = PeerBuffers.num_bytes(SIZE, PeerCombine.capacity_bytes(SIZE))
    memory = [shared(num_bytes, CPU) for _ in range(SIZE)]
    addresses = [one.data_ptr() for one in memory]
    combines = [PeerCombine(PeerMemory(None, rank, addresses), rank, CPU) for rank in range(SIZE)]
    partials = [torch.randn(19, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(SIZE)]
    ranks_of = (torch.arange(19) % 4).int()
    outs = shared(SIZE * 19 * 64 * 4, CPU).view(torch.float32).view(SIZE, 19, 64).fill_(1.0)
    assert combines[0]._most(64) == 16

    def work(rank):
        tp = NcclCommunicator._of(rank, SIZE, object(), None, combines[rank])
        assert tp.combines(1 << 16, 64, 1, torch.bfloat16)
        assert not tp.combines(1 << 16, 68, 8, torch.bfloat16)
        assert not tp.combines(1 << 16, 4096, 8, torch.bfloat16)
        assert not tp.combines(64, 64, 8, torch.bfloat16)
        tp.combine(partials[rank], ranks_of, outs[rank], torch.float32, adds=True)

    in_processes(SIZE, work, 60)
    assert (torch.cat(memory) == 0xFF).all(), "a word was left in a buffer"
    for out in outs:
        torch.testing.assert_close(out, combine_reference(partials, ranks_of, torch.float32, torch.ones(19, 64)))
    assert not NcclCommunicator._of(0, SIZE, object(), None).combines(1 << 16, 64, 8, torch.bfloat16)
