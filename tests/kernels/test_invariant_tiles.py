"""A product by tiles that agree: a row has the same bits whatever the number of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from interpreted_triton import multiply_in_order

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.quantization import InputFormat
from ringcore.kernels.linears import invariant_tiles
from ringcore.kernels.linears.invariant_tiles import InvariantTiles, agreeing, dense_tiles
from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, PackedWeight
from ringcore.kernels.linears.skinny_linear import skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import DotConfig, TmaConfig
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct
from ringcore.model_executor.weight import Derived


@pytest.fixture(autouse=True)
def sums_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", multiply_in_order)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float16, 0.01)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 80, generator=draw).to(device, dtype) for n in (70, 72))
    tiles = InvariantTiles(weight)
    whole = skinny_linear(x, weight, tiles.choose(70))
    assert (whole.float() - skinny_linear_reference(x, weight).float()).abs().max() < tolerance
    for rows in (slice(0, 1), slice(5, 8), slice(3, 67), slice(69, 70)):
        part = x[rows].contiguous()
        assert torch.equal(skinny_linear(part, weight, tiles.choose(len(part))), whole[rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes the interpreter too long")
@pytest.mark.parametrize(("num_weights", "num_inputs"), [(4096, 4096), (24576, 4096), (4096, 12288), (6144, 2112)])
@pytest.mark.parametrize("epilogue", ["gate", "add", "none"])
def test_every_tile_gives_a_row_the_same_bits(
    device: torch.device, num_weights: int, num_inputs: int, epilogue: str
) -> None:
    """Numbers of rows of every tile, in splits and in segments."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, num_inputs, generator=draw).to(device, torch.bfloat16) for n in (700, num_weights))
    tiles, activation = InvariantTiles(weight), "silu" if epilogue == "gate" else None
    stream = torch.randn(700, num_weights, generator=draw).to(device)

    def product(count: int) -> torch.Tensor:
        config, rows = tiles.choose(count), x[700 - count :].contiguous()
        if epilogue == "add":
            return skinny_linear(rows, weight, config, add_to=stream[700 - count :].clone())
        return skinny_linear(rows, weight, config, activation=activation)

    whole = product(700)
    for count in (1, 20, 60, 100, 200, 300, 500):
        assert torch.equal(product(count), whole[700 - count :]), (count, tiles.choose(count))


@pytest.mark.parametrize("num_inputs", [4096, 2112])
def test_segments_are_summed_as_splits_are(device: torch.device, num_inputs: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, num_inputs, generator=draw).to(device) for n in (9, 40))
    tile = DotConfig(32, 32, 4, 2, 4)
    split = skinny_linear(x, weight, tile)
    assert torch.equal(skinny_linear(x, weight, replace(tile, splits=1, segments=4)), split)
    torch.testing.assert_close(split, skinny_linear_reference(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("without_tma")
def test_few_rows_of_few_outputs_are_split(device: torch.device) -> None:
    """As many spans of inputs as many rows have: 64 tiles of outputs, then 4 times as many programs."""
    weight = torch.zeros(4096, 4096, dtype=torch.float16, device=device)
    tiles = InvariantTiles(weight)
    few, many = tiles.choose(32), tiles.choose(2048)
    assert (few.splits, few.segments, many.splits, many.segments) == (4, 1, 1, 4)
    wide = InvariantTiles(torch.zeros(24576, 64, dtype=torch.float16, device=device)).choose(32)
    assert (wide.splits, wide.segments) == (1, 1)


@pytest.fixture
def without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_tiles, "has_wgmma", lambda device: False)


def tiles_of(device: torch.device, num_warps: int) -> tuple[DotConfig, ...]:
    return agreeing(torch.float16, device, dense_tiles(64, num_warps), invariant_tiles._multiply)


def test_tiles_that_agree(device: torch.device) -> None:
    tiles = tiles_of(device, 4)
    assert 64 in [tile.block_rows for tile in tiles]
    assert all(tile.least_rows == tile.block_rows for tile in tiles), "padded rows are no other tile"


def test_what_was_not_launched_is_asked_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel warm-up binds a model without running anything."""
    with monkeypatch.context() as patch:
        patch.setattr(invariant_tiles, "skinny_linear", lambda x, weight, tile, out: out)
        assumed = tiles_of(device, 8)
    assert [tile.block_rows for tile in assumed] == [16, 32, 64, 128, 256]
    monkeypatch.setattr(
        invariant_tiles, "skinny_linear", lambda x, weight, tile, out: out.fill_(tile.num_stages)
    )  # 3 of 128 rows
    assert [tile.block_rows for tile in tiles_of(device, 8)] == [16, 32, 64, 256]


@pytest.mark.usefixtures("without_tma")
def test_tiles_that_would_cut_spans_elsewhere_are_left_out(device: torch.device, monkeypatch) -> None:
    """Of 2,112 inputs two spans have 17 and 16 blocks of 64, and would have 9 and 8 of 128."""
    monkeypatch.setattr(invariant_tiles, "_agreeing", lambda dtype, device, tiles, multiply: tiles)
    chosen = [InvariantTiles(torch.zeros(64, n, dtype=torch.float16, device=device)).choose(1) for n in (2048, 2112)]
    assert [(tile.splits, tile.block_rows) for tile in chosen] == [(2, 16), (2, 64)]


@pytest.mark.usefixtures("without_tma")
def test_many_rows_have_larger_tiles_unless_spans_are_summed(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(invariant_tiles, "_agreeing", lambda dtype, device, tiles, multiply: tiles)
    split, whole = (torch.zeros(n, 4096, dtype=torch.float16, device=device) for n in (4096, 24576))
    chosen = {rows: InvariantTiles(split).choose(rows) for rows in (32, 64, 128, 256, 2048)}
    assert {rows: (tile.block_weights, tile.block_rows) for rows, tile in chosen.items()} == {
        32: (64, 32),
        64: (64, 64),
        128: (128, 128),
        256: (128, 128),
        2048: (128, 128),
    }
    assert {tile.splits * tile.segments for tile in chosen.values()} == {4}, "the sum has the same order"
    of_whole = {rows: InvariantTiles(whole).choose(rows).block_rows for rows in (130, 256, 288, 2048)}
    stages = {
        n: InvariantTiles(whole).choose(n).num_stages for n in (128, 256)
    }  # 192 and 384 programs of 132 at a time
    assert stages == {128: 3, 256: 4}, "two programs share a multiprocessor where the last wave is far from full"
    assert of_whole == {130: 128, 256: 128, 288: 128, 2048: 256}, "256 rows: 3 waves of half tiles, not 2 of whole ones"


def test_up_to_64_rows_are_for_tma_on_hopper(device: torch.device, monkeypatch) -> None:
    """In the spans that others have; where these are whole blocks of inputs, and 16 rows of the weight whole pairs."""
    monkeypatch.setattr(invariant_tiles, "has_wgmma", lambda device: True)
    monkeypatch.setattr(invariant_tiles, "_agreeing", lambda dtype, device, tiles, multiply: tiles)

    def choose(num_weights: int, num_inputs: int, num_rows: int) -> DotConfig | TmaConfig:
        return InvariantTiles(torch.zeros(num_weights, num_inputs, dtype=torch.float16, device=device)).choose(num_rows)

    for num_weights, spans in ((4096, 4), (24576, 1)):
        for num_rows in (1, 33, 64):
            tile = choose(num_weights, 4096, num_rows)
            assert isinstance(tile, TmaConfig), num_rows
            assert tile.splits == spans
        many = choose(num_weights, 4096, 65)
        assert isinstance(many, DotConfig)
        assert many.splits * many.segments == spans
    assert isinstance(choose(4096, 4000, 8), DotConfig)
    assert isinstance(choose(4104, 4096, 8), DotConfig)
    monkeypatch.setattr(
        invariant_tiles,
        "_agreeing",
        lambda dtype, device, tiles, multiply: tuple(tile for tile in tiles if isinstance(tile, DotConfig)),
    )
    assert isinstance(choose(4096, 4096, 64), DotConfig), "tiles that do not agree"


def test_a_product_never_chooses_cublas(device: torch.device) -> None:
    weight = torch.randn(64, 32, dtype=torch.float16, device=device)
    product = KernelProduct(weight, None)
    chosen = [product.batch_invariant()._choose(64, 32, rows) for rows in (1, 4, 64, 5000)]
    assert all(isinstance(config, DotConfig) for config in chosen)
    assert product._choose(64, 32, 5000) is None, "the product itself is as it was"


@pytest.mark.parametrize("row_group", [128, 256])
def test_rows_that_are_rounded(device: torch.device, row_group: int) -> None:
    """FP8 times FP8: a row has the same bits in any number of rows, alone too, where one kernel rounds and multiplies
    else, and of many, where cuBLAS does."""
    draw = torch.Generator().manual_seed(1)
    codes = torch.randn(72, 256, generator=draw).to(device, torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(72, 256 // row_group, generator=draw).to(device)
    weight = PackedWeight(codes, scales, (72, 256), torch.float32, BYTES_FP8, 256, row_group)
    assert_alike(RoundedProduct(weight, None, row_group, cast(ScaledProduct, MANY), Derived()), device)


def test_rows_that_are_rounded_to_int8(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (72, 256), generator=draw, dtype=torch.uint8).to(device)
    scales = torch.rand(72, 1, generator=draw).to(device)
    weight = PackedWeight(codes, scales, (72, 256), torch.float32, BYTES_INT8, 256, 256)
    rounding = InputRounding(InputFormat("int8", "token"))
    assert_alike(RoundedInputs(KernelProduct(weight, None), rounding, None, cast(ScaledProduct, MANY)), device)


class Many:
    """A `ScaledProduct` that is wrong."""

    MIN_ROWS, ROWS, has_blocks = 16, 4, False

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(codes), 72, dtype=dtype, device=codes.device)


MANY = Many()


def assert_alike(product: RoundedProduct | RoundedInputs, device: torch.device) -> None:
    x = torch.randn(150, 256, generator=torch.Generator().manual_seed(2)).to(device)
    few, invariant = product(x[:3], NO_TOKEN_CONTEXT), product.batch_invariant()
    whole = invariant(x, NO_TOKEN_CONTEXT)
    torch.testing.assert_close(whole[:3], few, rtol=1e-3, atol=1e-3 * float(few.abs().max()))
    for rows in (slice(0, 1), slice(5, 8), slice(3, 43), slice(9, 109)):
        assert torch.equal(invariant(x[rows].contiguous(), NO_TOKEN_CONTEXT), whole[rows]), rows


def test_the_kernel_of_rounded_rows_is_asked(device: torch.device) -> None:
    """Its product, with scales of groups and of rows."""
    draw = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(n, 256, generator=draw).to(device) for n in (20, 128))
    rounded = weight.to(torch.float8_e4m3fn).float()
    out = torch.full((20, 128), torch.nan, device=device)
    invariant_tiles._multiply_rounded(rows, weight, invariant_tiles._ROUNDED[1], out)
    exact = rows @ rounded.t()
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
