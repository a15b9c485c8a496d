"""What a communicator sends through mailboxes, and how it copes with tensors that begin anywhere."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from rank_series import in_processes, shared

from ringcore.kernels.all_reduce import Mailboxes
from ringcore.worker.communicator import PeerCollectives
from ringcore.worker.peer_memory import PeerMemory

CPU = torch.device("cpu")
SIZE = 2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there, ranks have a GPU each: tests/gpu")


@pytest.fixture(scope="module")
def ranks():
    num_bytes = Mailboxes.num_bytes(SIZE, PeerCollectives._GATHERED_BYTES)
    memory = [shared(num_bytes, CPU) for _ in range(SIZE)]
    addresses = [one.data_ptr() for one in memory]
    yield [PeerCollectives(PeerMemory(None, rank, addresses), rank, CPU) for rank in range(SIZE)]
    del memory  # mapped until here


def part(rank, length):
    """[1, length], begun 8 bytes behind a multiple of 16."""
    values = torch.arange(length + 4) * (rank + 1) % 13
    return values.bfloat16()[None, 4:]


def test_tensors_that_begin_between_two_multiples(ranks):
    totals, outs = part(0, 64) + part(1, 64), shared(3 * SIZE * 128, CPU).view(torch.bfloat16).view(3, SIZE, 64)
    gathered = shared(SIZE * 256, CPU).view(torch.bfloat16).view(SIZE, 128)

    def work(rank):
        peers = ranks[rank]
        assert peers.reduces(part(rank, 64))
        assert peers.gathers(part(rank, 64))
        outs[0, rank] = peers.all_reduce(part(rank, 64))
        residual = torch.full((1, 68), 5.0).bfloat16()
        aside, aligned = residual[:, 4:], residual[:, :64].clone()
        assert peers.all_reduce(part(rank, 64), aside) is aside
        assert peers.all_reduce(part(rank, 64), aligned) is aligned
        outs[1, rank], outs[2, rank] = aside, aligned
        gathered[rank] = peers.all_gather_last_dim(part(rank, 64))

    in_processes(SIZE, work, 60)
    for rank in range(SIZE):
        assert torch.equal(outs[0, rank], totals[0])
        assert torch.equal(outs[1, rank], totals[0] + 5)
        assert torch.equal(outs[2, rank], totals[0] + 5)
        assert torch.equal(gathered[rank], torch.cat([part(0, 64), part(1, 64)], dim=-1)[0])


@pytest.mark.parametrize(
    ("shape", "dtype", "reduces", "gathers"),
    [
        ((64, 4096), torch.bfloat16, True, True),
        ((65, 4096), torch.bfloat16, False, True),
        ((256, 4096), torch.bfloat16, False, True),
        ((257, 4096), torch.bfloat16, False, False),
        ((1, 75968), torch.float32, True, True),
        ((1, 12), torch.bfloat16, False, False),
        ((1, 8), torch.int32, False, False),
    ],
)
def test_what_goes_to_nccl_is_a_matter_of_shape(ranks, shape, dtype, reduces, gathers):
    tensor = torch.empty(shape, dtype=dtype)
    assert (ranks[0].reduces(tensor), ranks[0].gathers(tensor)) == (reduces, gathers)
