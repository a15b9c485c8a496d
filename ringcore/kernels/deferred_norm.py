"""An RMS norm between two products without a launch of its own (deferred norm).

The product before the norm stores, besides its sum x with the residual stream, x * gain in 16 bits, and for each of
its tiles of outputs the sum of x^2 of each row: its epilogue. The product after it multiplies x * gain, and its sums by
1 / sqrt(mean(x^2) + eps): its epilogue. A row is rounded to 16 bits once, as by the kernel of the norm, but before it
is scaled: so it needs the range of bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["DeferredNorm", "load_squares", "scaled_by_norm", "store_deferred_norm"]


class DeferredNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * gain of every row of x [n, size]."""

    rows: torch.Tensor  # [n, size] of the product's dtype: x * gain
    squares: torch.Tensor  # [tiles, n] float32: of each row the sum of x^2 over the outputs of a tile
    gain: torch.Tensor  # [size], any float dtype
    eps: float

    @classmethod
    def allocate(
        cls, x: torch.Tensor, dtype: torch.dtype, num_tiles: int, gain: torch.Tensor, eps: float
    ) -> DeferredNorm:
        """dtype: of the product. num_tiles: see `num_output_tiles`."""
        squares = x.new_empty(num_tiles, len(x), dtype=torch.float32)
        return cls(torch.empty_like(x, dtype=dtype), squares, gain, eps)


@triton.jit
def load_squares(squares, rows, num_rows, num_tiles: tl.constexpr, block_tiles: tl.constexpr):
    """[block_tiles, rows]; to be loaded before the product and summed behind it."""
    tile = tl.arange(0, block_tiles)[:, None]
    return tl.load(squares + tile * num_rows + rows[None, :], mask=tile < num_tiles, other=0.0)


@triton.jit
def scaled_by_norm(total, squares, eps, num_inputs: tl.constexpr):
    """total: [outputs, rows] float32; squares: from `load_squares`."""
    return total * tl.rsqrt(tl.sum(squares, 0) / num_inputs + eps)[None, :]


@triton.jit
def store_deferred_norm(total, deferred, gain, squares, outputs, rows, num_rows, num_outputs):
    """total: [outputs, rows] float32, what was stored to the residual stream. The others as of `DeferredNorm`."""
    in_bounds = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    factors = tl.load(gain + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    targets = deferred + rows[None, :] * num_outputs + outputs[:, None]
    tl.store(targets, (total * factors[:, None]).to(deferred.dtype.element_ty), mask=in_bounds)
    sums = tl.sum(tl.where(in_bounds, total * total, 0.0), 0)
    tl.store(squares + tl.program_id(0) * num_rows + rows, sums, mask=rows < num_rows)
