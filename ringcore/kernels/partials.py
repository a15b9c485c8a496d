"""What is yet to be added to rows by the kernel that reads them next (a deferred add)."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Partials", "RowNorm"]


class RowNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * gain of each row x."""

    gain: torch.Tensor  # [size], any float dtype
    eps: float


class Partials(NamedTuple):
    """Their sum over the first dimension, or its norm: split-K partials of a product, or the rows of each token's
    experts, with their weights."""

    rows: torch.Tensor  # [p, n, size], of any float dtype, the last dimension contiguous
    weights: torch.Tensor | None = None  # [n, p], of any float dtype, contiguous; None: of 1
    norm: RowNorm | None = None  # of the sum (post-norm)

    def total(self) -> torch.Tensor:
        """[n, size] float32, in plain torch."""
        rows = self.rows.float()
        if len(rows) == 1 and self.weights is None and self.norm is None:
            return rows[0]
        total = (rows if self.weights is None else rows * self.weights.float().t()[:, :, None]).sum(0)
        if self.norm is None:
            return total
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + self.norm.eps)
        return total * scale * self.norm.gain.float()

    def fit(self, x: torch.Tensor) -> bool:
        """Whether they may be added to x."""
        are_aligned = self.rows.shape[1:] == x.shape and self.rows.stride(-1) == 1
        if self.weights is None:
            return are_aligned
        return are_aligned and self.weights.shape == (len(x), len(self.rows)) and self.weights.is_contiguous()
