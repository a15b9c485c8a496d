"""compressed-tensors' pack-quantized matrices: 4- and 8-bit integers packed along the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import PackedFormat
from ringcore.model_executor.linear_schemes.codes import WordCodes, unpacked
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix, groups_of, places_of_outputs
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived

__all__ = ["PackedScheme"]


@dataclass(frozen=True, slots=True)
class PackedScheme(LinearScheme):
    """matrix: of a matrix in act-order, whose groups are its own, so that it shares no product; otherwise None."""

    format: PackedFormat
    matrix: str | None = None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return quantized_product(self.quantized_matrix(shard, tensors), shard, bias, updatable)

    def quantized_matrix(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
        """Of the bound tensors."""
        bits, derived = self.format.bits, Derived()
        order = tensors["weight_g_idx"] if self.format.has_order else None
        return QuantizedMatrix(
            WordCodes(tensors["weight_packed"], bits, shard.inputs.length),
            tensors["weight_scale"],
            groups_of(shard, self.format.group, order),
            zero=1 << (bits - 1),
            zeros=self._zeros(shard, tensors["weight_zero_point"], derived) if self.format.has_zeros else None,
            derived=derived,
        )

    def _zeros(self, shard: LinearShard, words: torch.Tensor, derived: Derived) -> torch.Tensor:
        """words: [num_outputs / per_word, groups]."""
        bits = self.format.bits
        places = places_of_outputs(shard, 32 // bits).to(words.device)
        return derived.make(lambda: unpacked(words.t(), bits).index_select(1, places).t().to(torch.int16))
