"""Experts whose outputs are those of several matrices, each with a product of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme

__all__ = ["ConcatenatedScheme", "concatenated"]


@dataclass(frozen=True, slots=True)
class ConcatenatedScheme(ExpertsScheme):
    """Gate and up, each in its own scheme, on a CPU."""

    pieces: tuple[ExpertsScheme, ...]

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return tuple(tensor for piece in self.pieces for tensor in piece.tensors)

    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        return concatenated([piece.weight(tensors, dtype) for piece in self.pieces])


def concatenated(pieces: Sequence[ExpertWeight]) -> ExpertWeight:
    """pieces: on a CPU, where there are several."""
    return pieces[0] if len(pieces) == 1 else _Concatenated(pieces)


class _Concatenated(ExpertWeight):
    """Gate and up in act-order, where the kernels see the inputs of each in another order, or of two block types."""

    def __init__(self, pieces: Sequence[ExpertWeight]) -> None:
        first = pieces[0]
        self._pieces, self.dtype, self.device = pieces, first.dtype, first.device
        self.shape = first.shape[0], sum(piece.shape[1] for piece in pieces), first.shape[2]

    @property
    def stored(self) -> PackedWeight:
        raise AssertionError("for a device with kernels")

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return self._pieces[0].rounded(rows)

    def refresh(self) -> None:
        for piece in self._pieces:
            piece.refresh()

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.numbers(experts) for piece in self._pieces], 1)

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.product(rows, experts, ends) for piece in self._pieces], 1)
