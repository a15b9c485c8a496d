"""Experts whose matrices have more inputs than a rank's share: whole blocks, of which other ranks have the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight

__all__ = ["padded_inputs"]


def padded_inputs(weight: ExpertWeight, before: int, after: int) -> ExpertWeight:
    """weight: on a CPU, with so many inputs before and after the share, which are 0."""
    return _Padded(weight, before, after) if before or after else weight


class _Padded(ExpertWeight):
    def __init__(self, weight: ExpertWeight, before: int, after: int) -> None:
        num_experts, num_outputs, num_inputs = weight.shape
        self._weight, self._places = weight, slice(before, num_inputs - after)
        self._padding = before, after
        self.shape = num_experts, num_outputs, num_inputs - before - after
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def stored(self) -> PackedWeight:
        raise AssertionError("for a device with kernels")

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return self._weight.rounded(rows)

    def refresh(self) -> None:
        self._weight.refresh()

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return self._weight.numbers(experts)[:, :, self._places]

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self._weight.product(F.pad(rows, self._padding), experts, ends)
