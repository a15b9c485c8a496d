"""Products on a GPU by tiles that were found: the same numbers, and a step that is recorded can be made again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.host.measurements import Measurements
from ringcore.kernels.found_tiles import FoundTiles, TileProblem, as_plain, of_plain
from ringcore.kernels.packed_weight import NIBBLES, PackedWeight, stored_as
from ringcore.kernels.skinny_tiles import DotConfig, FmaConfig, PackedFmaConfig
from ringcore.kernels.skinny_times import NIBBLE_NUMBERS
from ringcore.kernels.tile_candidates import candidates
from ringcore.model_executor import ops
from ringcore.model_executor.arithmetic import FASTEST, Searched, arithmetic_of
from ringcore.model_executor.layers.activation import bind_activation
from ringcore.model_executor.layers.norm import RMSNorm
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
    assert [(call.problem.epilogue, call.problem.is_gated, call.num_rows) for call in calls] == [
        ("after_norm", True, 1),
        ("added", False, 1),
        ("plain", False, 1),
        ("partial", False, 1),
    ]
    assert [call.num_bytes for call in calls] == [of_first, of_first // 2, of_first, of_first]
    assert all(isinstance(call.chosen, FmaConfig) for call in calls)
    before = [recording.result(call) for call in calls]
    recording.run(calls)
    for call, found in zip(calls, before, strict=True):
        for other in (FmaConfig(4, 32, 1), None):  # one that takes the norm, and cuBLAS
            with tiles.found.trying(call.problem, other):
                again = recording.result(call)
            torch.testing.assert_close(again.float(), found.float(), atol=3e-2, rtol=2e-2)
    assert tiles.found.search(calls[1].problem, lambda: {"config": as_plain(FmaConfig(4, 32, 1))})
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
