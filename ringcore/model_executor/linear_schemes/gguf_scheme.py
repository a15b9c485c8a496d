"""Matrices that stay in the blocks of their GGUF file, and are expanded for each product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import GgufFormat
from ringcore.model_executor.linear_schemes.dense import Dense, dense_product
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Weight

__all__ = ["GgufScheme"]


@dataclass(frozen=True, slots=True)
class GgufScheme(LinearScheme):
    """A rank's share of the inputs that is not of whole blocks is expanded when it is loaded."""

    format: GgufFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        dense = Dense().weights(shard)
        if not self._is_whole(shard):
            return dense
        return {suffix: self._in_blocks(weight, shard.inputs.length) for suffix, weight in dense.items()}

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        if not self._is_whole(shard):
            return dense_product(tensors["weight"], bias, updatable, shard.prefers_float32)
        return ExpandingProduct(GgufMatrix(tensors["weight"], self.format), bias)

    def _is_whole(self, shard: LinearShard) -> bool:
        numbers, _ = self.format.block
        return shard.inputs.start % numbers == 0 and shard.inputs.length % numbers == 0

    def _in_blocks(self, dense: Weight, num_inputs: int) -> Weight:
        parts = tuple(replace(part, blocks=self.format) for part in dense.parts)
        return replace(dense, shape=(dense.shape[0], self.format.row_bytes(num_inputs)), dtype=torch.uint8, parts=parts)
