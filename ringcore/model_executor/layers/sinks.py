"""Attention sinks: for each head a logit that takes part in the softmax and has no value."""

from __future__ import annotations

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.weight import Tensors, Uniform, Weight, WeightedLayer, WeightPart

__all__ = ["AttentionSinks"]


class AttentionSinks(WeightedLayer):
    """Those of this rank's heads."""

    def __init__(self, name: str, checkpoint_name: str, num_heads: int, dtype: torch.dtype, tp: TensorParallel) -> None:
        """checkpoint_name: of the tensor [num_heads], whole."""
        length = num_heads // tp.size
        part = WeightPart(checkpoint_name, (num_heads,), 0, tp.rank * length, length)
        self._weight = Weight(name, (length,), dtype, (part,), Uniform(-1.0, 1.0))
        self.values: torch.Tensor  # [this rank's heads]

    def weights(self) -> list[Weight]:
        return [self._weight]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        self.values = tensors.pop(self._weight.name)
