"""The combine of expert parallelism through buffers against sums by torch: of ranks with experts of all tokens,
of some, of none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from rank_series import Ranks
from test_precompile import run

from ringcore.kernels.collectives.combine import combine, combine_reference, max_combined_tokens, owned_tokens
from ringcore.kernels.collectives.peer_buffers import PeerBuffers
from ringcore.kernels.launch.dependent_launch import supports_pdl

pytestmark = pytest.mark.sampled

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no graphs")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, device):
    return Ranks(request.param, device, 64 if device.type == "cuda" else 3, 1 << 14)


@dataclass
class Combining:
    partials: list[torch.Tensor]
    ranks_of: torch.Tensor
    outs: list[torch.Tensor]
    rounds_to: torch.dtype
    adds: bool

    def run(self, rank: int, buffers: PeerBuffers, pdl: bool) -> None:
        out = self.outs[rank]
        combine(self.partials[rank], self.ranks_of, out, buffers, rounds_to=self.rounds_to, adds=self.adds, pdl=pdl)

    def expected(self) -> torch.Tensor:
        """To be asked for before the call, which may add to its outs."""
        return combine_reference(self.partials, self.ranks_of, self.rounds_to, self.outs[0] if self.adds else None)


def combining(ranks, num_tokens, hidden, seed, which, dtype=torch.float32, *, adds=False):
    """which: ranks of a token, a bit each; or None for random ones. Rows of ranks without an expert are NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << ranks.size, (num_tokens,), generator=generator, dtype=torch.int32)
    bits = bits if which is None else torch.full_like(bits, which)
    partials = []
    for rank in range(ranks.size):
        partial = torch.randn(num_tokens, hidden, generator=generator)
        partial[(bits >> rank) & 1 == 0] = float("nan")
        partials.append(ranks.put(partial))
    before = torch.randn(num_tokens, hidden, generator=generator)
    outs = [ranks.put(before) if adds else ranks.empty(num_tokens, hidden, dtype=dtype) for _ in partials]
    return Combining(partials, ranks.put(bits), outs, dtype, adds)


def run_and_check(ranks, calls, **options):
    results = [call.expected() for call in calls]
    ranks.run(calls, **options)
    for call, result in zip(calls, results, strict=True):
        for out in call.outs:
            # The interpreter cuts 16-bit numbers off: a unit in the last place of a sum of up to 8.
            atol = 1e-6 if call.rounds_to == torch.float32 else 2.0**-5
            torch.testing.assert_close(out, result, atol=atol, rtol=1e-6)
            assert torch.equal(out, call.outs[0]), "ranks differ"


def test_sums_of_the_ranks_with_experts(ranks):
    """All tokens of all ranks, of one rank, of none, of some; one token a rank; rows longer than a tile."""
    everyone = (1 << ranks.size) - 1
    kinds = [(everyone, 7, 24), (1, ranks.size, 8), (0, 5, 40), (None, 13, 104), (1 << (ranks.size - 1), 4, 16)]
    calls = [
        combining(ranks, n, hidden, seed, which, dtype, adds=seed % 2 == 0)
        for seed, (which, n, hidden) in enumerate([*kinds, (None, 3, 1032 // ranks.size // 8 * 8)])
        for dtype in (torch.float32, torch.bfloat16)
    ]
    run_and_check(ranks, calls, delay_s=0.005)


def test_tokens_are_owned_in_runs(ranks):
    for num_tokens in (ranks.size, 7, 64):
        owned = [token for rank in range(ranks.size) for token in owned_tokens(num_tokens, rank, ranks.size)]
        assert owned == list(range(num_tokens))
    hidden = 64
    most = max_combined_tokens(ranks.buffers[0], hidden)
    assert max(len(owned_tokens(most, rank, ranks.size)) for rank in range(ranks.size)) * hidden * 8 <= 1 << 14
    run_and_check(ranks, [combining(ranks, most, hidden, 1, None)])
    with pytest.raises(AssertionError):
        combining(ranks, most + 1, hidden, 1, None).run(0, ranks.buffers[0], False)


def test_not_a_number_and_the_sentinel_end_no_call(ranks):
    call = combining(ranks, 6, 16, 3, (1 << ranks.size) - 1)
    call.partials[0].view(torch.uint8)[2, :8] = 0xFF
    call.partials[1][5, 3] = float("nan")
    ranks.run([call])
    for out in call.outs:
        expected = torch.zeros(6, 16, dtype=torch.bool)
        expected[2, :2], expected[5, 3] = True, True
        assert torch.equal(out.isnan().cpu(), expected)


@on_gpu
def test_a_graph_serves_every_routing(ranks):
    call = combining(ranks, 32, 96, 4, None)
    run_and_check(ranks, [call], pdl=supports_pdl(ranks.device))
    graphs = ranks.capture([call], pdl=supports_pdl(ranks.device))
    for which in (0, 1, 3):
        call.ranks_of.fill_(which)
        for partial in call.partials:
            partial.nan_to_num_()
        ranks.replay(graphs)
        torch.testing.assert_close(call.outs[0], call.expected())


@pytest.mark.long_form
def test_they_compile_for_sm90(tmp_path):
    script = """
        import torch, triton_for_sm90
        from ringcore.kernels.collectives.combine import combine
        from ringcore.kernels.collectives.peer_buffers import PeerBuffers
        from ringcore.kernels.mixtures.place_pairs import place_pairs
        from ringcore.kernels.mixtures.placed_pairs import SlotTables
        from ringcore.kernels.launch.precompile import intercept_launches

        tables = SlotTables(torch.zeros(128, 17).int(), torch.zeros(128).int(), torch.zeros(128).long())
        with intercept_launches() as found:
            for size in (2, 8):
                buffers = PeerBuffers.at([16 * rank for rank in range(size)], 0, 1 << 20, torch.device("cpu"))
                for dtype, out in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
                    partial, bits = torch.empty(64, 2048), torch.zeros(64, dtype=torch.int32)
                    rows = torch.empty(64, 2048, dtype=out)
                    combine(partial, bits, rows, buffers, rounds_to=dtype, adds=True, pdl=True)
            place_pairs(torch.zeros(64, 8).long(), tables, 18, True)
        for (kernel, _), variant in found.items():
            print(kernel.__name__, ".local" in kernel.preload(variant.specialization).asm["ptx"])
    """
    assert run(script, tmp_path).splitlines() == ["_combine_kernel False"] * 4 + ["_place_kernel False"]
