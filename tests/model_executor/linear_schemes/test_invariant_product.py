"""Products in tiles of sizes for which a library was seen to compute a row alike."""

from __future__ import annotations

import pytest
import torch

from ringcore.errors import ConfigError
from ringcore.model_executor.linear_schemes.cpu_packing import pack_alike, plain
from ringcore.model_executor.linear_schemes.invariant_product import (
    agreeing_sizes,
    cancelling,
    multiply_in_tiles,
    random_rows,
)

WEIGHT = torch.randn(40, 24, generator=torch.Generator().manual_seed(2)).bfloat16().float()


def by_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(row * WEIGHT).sum(1) for row in x]) if len(x) else x.new_empty(0, 40)


def test_sizes_that_are_computed_otherwise_are_left_out() -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return by_rows(x) if len(x) >= 4 else torch.nextafter(by_rows(x), torch.tensor(0.0))

    sizes = agreeing_sizes(multiply, random_rows(24))
    assert (min(sizes), max(sizes)) == (4, 256)
    assert 2 in agreeing_sizes(by_rows, random_rows(24))


def test_a_product_that_depends_on_the_place_of_a_row_is_refused() -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return by_rows(x) + (torch.arange(len(x)) % 2)[:, None] * 1e-4

    with pytest.raises(ConfigError, match=r"deterministic=True: .* depends on where a row is; give another dtype"):
        agreeing_sizes(multiply, random_rows(24))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 9, 256, 257, 600])
def test_calls_have_these_sizes_alone(num_rows: int) -> None:
    seen = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return by_rows(x)

    x = torch.randn(num_rows, 24)
    assert torch.equal(multiply_in_tiles(multiply, x, (4, 8, 256)), by_rows(x))
    assert set(seen) <= {4, 8, 256}


@pytest.mark.parametrize("pack", [pack_alike, plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_libraries_of_this_machine(pack: object, dtype: torch.dtype) -> None:
    multiply = pack(WEIGHT.to(dtype), None)
    if dtype == torch.float32:
        sizes = agreeing_sizes(multiply, random_rows(24))
    else:
        weight, x = cancelling(40, 24, dtype)
        sizes = agreeing_sizes(pack(weight, None), x)
    x = torch.randn(300, 24).to(dtype)
    whole = multiply_in_tiles(multiply, x, sizes)
    assert torch.allclose(whole.float(), x.float() @ WEIGHT.t(), atol=0.3 if dtype == torch.bfloat16 else 1e-4)
    for rows in (slice(0, 1), slice(7, 9), slice(0, 255), slice(100, 300)):
        assert torch.equal(multiply_in_tiles(multiply, x[rows], sizes), whole[rows])


def test_sums_of_sixteen_bits_in_another_order_are_seen() -> None:
    """A random product hides them; one that cancels does not."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        terms = (x.float()[:, None] * weight.float()).unbind(-1)
        return sum(reversed(terms) if len(x) == 1 else terms).to(x.dtype)  # one after the other

    weight, x = cancelling(8, 96, torch.bfloat16)
    sizes = agreeing_sizes(lambda rows: multiply(rows, weight), x)
    assert 1 not in sizes
    assert 2 in sizes
