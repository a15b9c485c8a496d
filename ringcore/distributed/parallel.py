"""Parallelism as a model sees it, passed as arguments: of tensors, a rank and collectives; of layers, a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

__all__ = ["ONLY_STAGE", "SingleRank", "Stage", "TensorParallel"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `size` of a pipeline: successive layers, the first ones with the embedding, the last ones with
    the head. has_all_layers: those of a model, without its embedding and head."""

    index: int
    size: int
    has_all_layers: bool = False

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


ONLY_STAGE = Stage(0, 1)
LAYERS_ALONE = Stage(1, 3, has_all_layers=True)


class TensorParallel(ABC):
    """One rank of `size`. All ranks call the same collectives in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, [same shape]; may be written in place."""

    def all_reduce_add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += the sum over ranks of `partial`, in place; both [n, hidden_size], `residual` may be float32.

        `residual` is equal on every rank, before and after. `partial` may be overwritten.
        """
        residual.add_(self.all_reduce(partial))

    def begin_combine(self) -> None:  # noqa: B027  most have none
        """Allocates what `combine` needs. All ranks call it, once, before any of them asks `combines`."""

    def combines(self, num_tokens: int, hidden_size: int, k: int, dtype: torch.dtype) -> bool:
        """Whether `combine` is to take the place of an all-reduce of [num_tokens, hidden_size] float32, of tokens with
        k experts each. All ranks answer alike. dtype: of the sums."""
        return False

    def combine(
        self, partial: torch.Tensor, ranks_of: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, adds: bool
    ) -> None:
        """out = the sum over ranks of `partial`, rounded to `dtype`; or where `adds` out += that. All [num_tokens,
        hidden_size], contiguous; partial: float32; out: of `dtype`, or float32. The same bits on every rank.

        ranks_of: [num_tokens] int32, equal on every rank: bit r is set where rank r has an expert of the token. The
        rows of `partial` of others are not read. Only where it `combines`."""
        raise AssertionError("this group does not combine")

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """`tensor` of rank `source`, contiguous, bit by bit into that of every other rank."""
        raise AssertionError("this group does not broadcast")

    @abstractmethod
    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[..., n] on each rank -> [..., n * size], in rank order, the same bits on every rank; in `out`, contiguous
        and of the same dtype, where given."""

    def detached(self) -> TensorParallel:
        """A rank of the same number and size without communication (kernel warm-up, dummy runs): the other ranks need
        not take part.

        The results of its collectives have the right shape and no meaning; their kernels are compiled or intercepted,
        never launched. It needs no `close`, and is valid until this rank's `close`.
        """
        return _DetachedRank(self.rank, self.size)

    def close(self) -> None:  # noqa: B027  a single rank has no connections
        """Closes the connections between the ranks. Idempotent; no collective may follow."""


class SingleRank(TensorParallel):
    """No parallelism: the collectives are the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return tensor if out is None or out is tensor else out.copy_(tensor)


class _DetachedRank(TensorParallel):
    """A detached rank of a group whose collectives launch no Triton kernels."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1, out=out)
