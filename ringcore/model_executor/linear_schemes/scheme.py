"""The interface of a linear scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Weight

__all__ = ["LinearScheme", "SchemeOf"]


class LinearScheme(ABC):
    """How the matrices of some linears are stored and multiplied. Equal schemes may share a fused layer.

    A scheme that decorates another one adds tensors to its, and wraps its product.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[MatrixTensor, ...]:
        """Those of one matrix in the checkpoint, without the bias, which is the same in every scheme."""

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        """The tensors of one rank's share, by suffix. Raises `ModelLoadError` where the share cannot be cut out."""
        return {tensor.suffix: shard.weight(tensor) for tensor in self.tensors}

    @abstractmethod
    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        """The product by bound `tensors`, those of `weights` by their suffix. bias: [out], or None where this rank adds
        none.

        updatable: the product computes from `tensors` and `bias` as they are, or recomputes what it derives from them
        in `refresh`. Otherwise what it does not keep is freed.
        """


SchemeOf = Callable[[str], LinearScheme]  # by a matrix's name in the checkpoint, without ".weight"
