"""AWQ: 4-bit integers packed along the outputs, interleaved, inputs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import AwqFormat
from ringcore.model_executor.linear_schemes.codes import AwqCodes, awq_columns, unpacked
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix, groups_of, places_of_outputs
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived

__all__ = ["AwqScheme"]


@dataclass(frozen=True, slots=True)
class AwqScheme(LinearScheme):
    format: AwqFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        derived, stored = Derived(), tensors["qzeros"]
        columns = awq_columns(places_of_outputs(shard, 8)).to(stored.device)
        matrix = QuantizedMatrix(
            AwqCodes(tensors["qweight"], columns),
            tensors["scales"].t(),
            groups_of(shard, self.format.group),
            zeros=derived.make(lambda: unpacked(stored, 4).index_select(1, columns).t().to(torch.int16)),
            derived=derived,
        )
        return quantized_product(matrix, shard, bias, updatable)
