"""Collectives whose sums have one order for every shape and algorithm: that of the ranks."""

from __future__ import annotations

import torch

from ringcore.distributed.parallel import TensorParallel

__all__ = ["RankOrdered"]


class RankOrdered(TensorParallel):
    """The group `tp`, whose all-reduce is an all-gather and a sum on each rank.

    A ring adds up each segment of a tensor in another order, and where segments end depends on the number of rows;
    which algorithm is taken depends on it too. A gather moves bits alone, so it may be any. Every rank receives what
    all others have, which is size / 2 times what a ring's all-reduce moves.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self.rank, self.size, self._tp = tp.rank, tp.size, tp

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 whatever the dtype, rounded once."""
        first, *others = self._tp.all_gather_last_dim(tensor.contiguous()).float().chunk(self.size, -1)
        total = first.clone()
        for part in others:
            total += part
        return total.to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._tp.broadcast(tensor, source)

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._tp.all_gather_last_dim(tensor, out)

    def detached(self) -> TensorParallel:
        return RankOrdered(self._tp.detached())
