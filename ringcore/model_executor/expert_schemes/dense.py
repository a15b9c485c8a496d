"""Dense experts, whose matrices a checkpoint may have transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import Inputs, MatrixTensor, Outputs
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme

__all__ = ["DenseScheme"]


@dataclass(frozen=True, slots=True)
class DenseScheme(ExpertsScheme):
    is_transposed: bool = False

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return (MatrixTensor("", (Inputs(), Outputs()) if self.is_transposed else (Outputs(), Inputs())),)

    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        return DenseExperts(tensors[""], self.is_transposed)
