"""A product by one tile: a row has the same bits whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.invariant_tiles import invariant_tile
from ringcore.kernels.skinny_linear import skinny_linear, skinny_linear_reference
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.01)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 80, generator=draw).to(device, dtype) for n in (70, 72))
    tile = invariant_tile(weight)
    whole = skinny_linear(x, weight, tile)
    assert (whole.float() - skinny_linear_reference(x, weight).float()).abs().max() < tolerance
    for rows in (slice(0, 1), slice(5, 8), slice(3, 67), slice(69, 70)):
        assert torch.equal(skinny_linear(x[rows].contiguous(), weight, tile), whole[rows])


def test_a_product_never_chooses_by_its_rows(device: torch.device) -> None:
    weight = torch.randn(64, 32, dtype=torch.bfloat16, device=device)
    product = KernelProduct(weight, None)
    chosen = {product.batch_invariant()._choose(64, 32, rows) for rows in (1, 4, 64, 5000)}
    assert chosen == {invariant_tile(weight)}
    assert {product._choose(64, 32, rows) for rows in (1, 5000)} != chosen, "the product itself is as it was"
