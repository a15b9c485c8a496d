"""Products on a GPU by tiles that were found: the same numbers, and a step that is recorded can be made again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.host.measurements import Measurements
from ringcore.kernels.linears import skinny_configs
from ringcore.kernels.linears.found_tiles import FoundTiles, TileProblem, as_plain, of_plain
from ringcore.kernels.linears.packed_weight import NIBBLES, PackedWeight, stored_as
from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig, PackedFmaConfig
from ringcore.kernels.linears.skinny_times import DENSE_NUMBERS, E2M1_NUMBERS, NIBBLE_NUMBERS
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing
from ringcore.kernels.mixtures.experts import experts, new_expert_counters
from ringcore.kernels.search.tile_candidates import candidates, grouped_candidates
from ringcore.model_executor import ops
from ringcore.model_executor.arithmetic import FASTEST, Searched, arithmetic_of
from ringcore.model_executor.layers.activation import bind_activation
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.layers.searched_experts import SearchedExperts
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.searched_scheme import Recording, SearchedProduct, SearchedTiles
from ringcore.model_executor.residual import Residual

INPUTS, OUTPUTS = 32, 16


@pytest.fixture
def tiles(tmp_path) -> SearchedTiles:
    return SearchedTiles(FoundTiles(Measurements(tmp_path), {"device": "a card"}))


def linear(tiles: SearchedTiles, outputs: int, inputs: int, device: torch.device) -> SearchedProduct:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16().to(device) / 8
    scheme = Searched(tiles).schemes(lambda matrix: Dense())("name")
    shard = SimpleNamespace(prefers_float32=False)
    product = scheme.product(shard, {"weight": weight}, None, True)  # type: ignore[arg-type]
    assert isinstance(product, SearchedProduct)
    return product


def test_a_recorded_step_can_be_made_again_by_other_tiles(tiles, device, monkeypatch):
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(skinny_configs, "choose", lambda *shape, is_gated=False: FmaConfig(16, 32, 1))
    norm = RMSNorm("norm", "model.norm", INPUTS, 1e-6, torch.bfloat16)
    norm.bind({"norm.weight": torch.ones(INPUTS, dtype=torch.bfloat16, device=device)})
    gate = bind_activation("silu", device)
    first, second = linear(tiles, 2 * OUTPUTS, INPUTS, device), linear(tiles, INPUTS, OUTPUTS, device)

    def step(num_rows: int) -> torch.Tensor:
        hidden = Residual(torch.ones(num_rows, INPUTS, device=device))
        inner = first.gated_after_norm(norm, hidden, gate, NO_TOKEN_CONTEXT)
        second.add_to(hidden, inner, NO_TOKEN_CONTEXT)
        plain = first(hidden.rows.bfloat16(), NO_TOKEN_CONTEXT)
        return plain + first.partial(hidden.rows.bfloat16(), NO_TOKEN_CONTEXT)

    usual = step(1)
    tiles.recording = recording = Recording()
    step(1)
    tiles.recording = None
    calls = recording.calls
    of_first = 2 * OUTPUTS * INPUTS * 2
    assert [(problem.epilogue, problem.is_gated, call.num_rows) for call in calls for problem in call.asked] == [
        ("after_norm", True, 1),
        ("added", False, 1),
        ("plain", False, 1),
        ("partial", False, 1),
    ]
    assert [call.num_bytes for call in calls] == [of_first, of_first // 2, of_first, of_first]
    assert all(isinstance(chosen, FmaConfig) for call in calls for chosen in call.asked.values())
    before = [recording.result(call) for call in calls]
    recording.run(calls)
    for call, found in zip(calls, before, strict=True):
        for other in (FmaConfig(16, 16, 1), None):  # one that takes the norm, and cuBLAS
            with tiles.found.trying(next(iter(call.asked)), other):
                again = recording.result(call)
            torch.testing.assert_close(again.float(), found.float(), atol=3e-2, rtol=2e-2)
    assert tiles.found.search(next(iter(calls[1].asked)), lambda: {"config": as_plain(FmaConfig(16, 16, 1))})
    torch.testing.assert_close(step(1), usual, atol=3e-2, rtol=2e-2)


def test_the_option_decides(tiles, device):
    assert arithmetic_of(False, device) is FASTEST
    assert isinstance(arithmetic_of(False, device, tiles), Searched)
    assert Searched(tiles).schemes(lambda matrix: Dense())("a") == Searched(tiles).schemes(lambda matrix: Dense())("b")


def test_tiles_are_kept_as_they_are():
    for config in (None, FmaConfig(2, 512, 4, True), PackedFmaConfig(2, 512, 4, 9), DotConfig(64, 64, 4, 3, 2)):
        assert of_plain(as_plain(config)) == config
    for content in ({}, {"kind": "gemm"}, {"kind": "fma", "num_warps": "4"}, {"kind": "fma", "x": 1}, 3):
        with pytest.raises((ValueError, TypeError, KeyError)):
            of_plain(content)


def test_packed_weights_say_how_they_are_stored():
    codes, scales = torch.zeros(64, 8, dtype=torch.int16), torch.ones(64, 1)
    weight = PackedWeight(codes, scales, (64, 32), torch.bfloat16, NIBBLES, 8)
    assert stored_as(weight) == ("packed", "int4 for bfloat16", NIBBLE_NUMBERS)
    assert stored_as(torch.zeros(2, 2).half())[:2] == ("dense", "float16")
    problem = TileProblem(4096, 4096, False, "added", "packed", "int4", NIBBLE_NUMBERS, 16)
    assert problem.shown == "4,096 x 4,096 int4 added, up to 16 rows"
    linear = SimpleNamespace(num_outputs=4096, num_inputs=4096, is_gated=False, num_rows=16)
    chosen = DotConfig(128, 256, 8, 4, 2)
    for kind in ("packed", "rounded"):
        found = candidates(linear, kind, NIBBLE_NUMBERS, chosen, 12)
        assert found[0] == chosen
        assert 4 <= len(found) == len(set(found)) <= 12
        assert kind == "packed" or {one.block_inputs for one in found} == {256}, "a block has whole groups"
    assert candidates(linear, "packed", NIBBLE_NUMBERS, None, 12) == [None]


def test_experts_by_tiles_that_were_found(tiles, device):
    """Of few tokens, whose routing is made anew, since that of a dummy step has one expert."""
    generator = torch.Generator().manual_seed(3)
    up, down = (torch.randn(4, *shape, generator=generator).bfloat16().to(device) / 8 for shape in ((64, 32), (32, 32)))
    matrices = ExpertMatrices(DenseExperts(up), DenseExperts(down))
    small = DotConfig(32, 32, 1, 2, 1, block_rows=16)
    asked = []

    def choose(*shape):
        asked.append(shape)
        return small

    searched = SearchedExperts(experts, choose, tiles)
    x = torch.randn(5, 32, generator=generator).bfloat16().to(device)
    routing = Routing(torch.zeros(5, 2, dtype=torch.int32, device=device), torch.ones(5, 2, device=device).bfloat16())
    given = x, routing, matrices, ExpertGate()
    counters = new_expert_counters(matrices)
    usual = experts(*given, config=small, counters=counters)
    tiles.recording = recording = Recording()
    rows = torch.zeros(5, 32, device=device)
    assert torch.equal(searched(*given, counters=counters, out=torch.empty_like(x)), usual)
    searched(*given, counters=counters, add_to=rows)
    tiles.recording = None
    assert set(asked) == {(4, num_weights, 32, 5, 2, torch.bfloat16, DENSE_NUMBERS) for num_weights in (64, 32)}
    alone, added = recording.calls
    assert [(p.num_outputs, p.num_experts, p.k, p.max_rows) for p in alone.asked] == [(64, 4, 2, 16), (32, 4, 2, 16)]
    assert alone.num_bytes == up.nbytes + down.nbytes
    other = DotConfig(64, 16, 2, 2, 1, block_rows=16)
    for call in (alone, added):
        first, second = recording.result(call), recording.result(call)
        assert torch.equal(first, second)
        problem = next(iter(call.asked))
        with tiles.found.trying(problem, other):
            torch.testing.assert_close(recording.result(call).float(), first.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(recording.result(added).float(), recording.result(alone).float(), atol=2e-2, rtol=2e-2)
    large = replace(problem, num_experts=128, k=8, num_outputs=1536, num_inputs=2048)
    found = grouped_candidates(large, small, 12)
    assert found[0] == small
    assert len(set(found)) == 12
    of_4_bits = grouped_candidates(replace(large, numbers=E2M1_NUMBERS), small, 12)
    assert max(tile.block_inputs for tile in of_4_bits) <= 128
