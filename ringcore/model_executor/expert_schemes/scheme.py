"""The seam of expert schemes: how one matrix of every expert of a layer is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.weight import Arrangement

__all__ = ["ExpertsScheme"]


class ExpertsScheme(ABC):
    @property
    @abstractmethod
    def tensors(self) -> tuple[MatrixTensor, ...]:
        """Those of one expert's matrix. A checkpoint with one tensor for all experts of a layer has these axes after
        that of the experts, and the suffix at the end of the matrix's name."""

    def arrangement(self, suffix: str) -> Arrangement | None:
        """Of the tensor of this suffix, where there are kernels: see `Weight`."""
        return None

    @abstractmethod
    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        """tensors: of a rank, by suffix, [num_experts, ...]. They are used as they are, so they may get new contents.
        dtype: of the inputs."""
