"""A product whose rows do not depend on how many there are: a library is called for numbers of rows alone for which it
was seen to compute every row alike.

A library takes another kernel, or adds up in another order, for one row or few of them. Which, depends on the library,
the processor, the shape and the number of threads. So the library itself is asked, once for each shape: the same rows
of random numbers, in calls of several sizes and at other places, must have the same bits. A number of rows between two
such sizes is padded.

That tells of float32 results, of which many differ in the last bit after sums in another order. 16 bits hide such a
difference but once in many thousands, unless the sum is small beside its terms: so a matrix of 16 bits is asked about
by another one of its shape, with columns that cancel. Where that cannot be, all calls have one size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, TokenContext
from ringcore.errors import ConfigError
from ringcore.model_executor.linear_schemes.product import Product

__all__ = ["ONE_SIZE", "InvariantProduct", "agreeing_sizes", "cancelling", "multiply_in_tiles", "random_rows"]

Multiply = Callable[[torch.Tensor], torch.Tensor]  # x [n, in] -> [n, out]

ONE_SIZE = (32,)  # of all calls, where sizes cannot be compared
_TILE = 256  # rows of one call at most
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224)


def random_rows(num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[256, num_inputs], of many magnitudes: their products with anything need more bits than a float32 sum has."""
    draw = torch.Generator().manual_seed(1)
    widest = 16 if dtype == torch.bfloat16 else 8  # of which float16 has no more
    magnitudes = torch.randint(-widest, widest + 1, (num_inputs,), generator=draw).exp2()
    return (torch.randn(_TILE, num_inputs, generator=draw) * magnitudes).to(dtype)


def cancelling(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [num_outputs, num_inputs], x [256, num_inputs]) whose products are 0 but for the roundings of the sums:
    the columns are pairs of equals, at random places, and those of x are opposite."""
    draw, half = torch.Generator().manual_seed(2), num_inputs // 2
    first, second = torch.randperm(num_inputs, generator=draw)[: 2 * half].view(2, half)
    x, weight = random_rows(num_inputs, dtype), torch.randn(num_outputs, num_inputs, generator=draw).to(dtype)
    x[:, second] = -x[:, first]
    weight[:, second] = weight[:, first]
    return weight, x


def agreeing_sizes(multiply: Multiply, x: torch.Tensor) -> tuple[int, ...]:
    """The numbers of rows for which `multiply` computes every row of x [256, in], wherever it is, as in a call of all.
    Raises `ConfigError` where it does not even in such calls."""
    whole = multiply(x)
    if not torch.equal(multiply(x.flip(0)).flip(0), whole):
        raise ConfigError(
            f"deterministic=True: the product of {_TILE} rows of {x.shape[1]} numbers in {x.dtype} depends on where a "
            "row is; give another dtype, or deterministic=False",
            option="deterministic",
            value=True,
        )
    return (*(size for size in _SIZES if _agrees(multiply, x, whole, size)), _TILE)


def _agrees(multiply: Multiply, x: torch.Tensor, whole: torch.Tensor, size: int) -> bool:
    """In the first rows and in the last ones: a row is at another place there than among all."""
    ends = slice(0, size), slice(_TILE - size, None)
    return all(torch.equal(multiply(x[rows].clone()), whole[rows]) for rows in ends)


def multiply_in_tiles(multiply: Multiply, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """x: [n, in] -> [n, out], in calls of `sizes` rows, ascending, the largest first."""
    num_rows, tile = len(x), sizes[-1]
    if num_rows in sizes:
        return multiply(x)
    products = [multiply(rows) for rows in torch.split(x[: num_rows // tile * tile], tile)] if num_rows > tile else []
    left = num_rows % tile
    if left or not num_rows:
        size = next(size for size in sizes if size >= left)
        padded = x.new_zeros(size, x.shape[1])
        padded[:left] = x[num_rows - left :]
        products.append(multiply(padded)[:left])
    return products[0] if len(products) == 1 else torch.cat(products)


class InvariantProduct(Product):
    """Norm, gate and sum are operations of their own."""

    def __init__(self, inner: Product, sizes: tuple[int, ...]) -> None:
        """inner: a function of each row, in calls of these sizes."""
        self._inner, self._sizes = inner, sizes

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        assert tokens.adapter_ids is None, "a product that depends on a row's adapter is not padded"
        product = multiply_in_tiles(lambda rows: self._inner(rows, NO_TOKEN_CONTEXT), x.contiguous(), self._sizes)
        return product if out is None else out.copy_(product)

    def refresh(self) -> None:
        self._inner.refresh()
