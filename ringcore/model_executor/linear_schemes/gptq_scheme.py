"""GPTQ: 4- and 8-bit integers packed along the inputs, inputs first; zeros along the outputs, stored less one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import GptqFormat
from ringcore.model_executor.linear_schemes.codes import WordCodes, unpacked
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix, groups_of, places_of_outputs
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived

__all__ = ["GptqScheme"]


@dataclass(frozen=True, slots=True)
class GptqScheme(LinearScheme):
    """matrix: of a matrix in act-order, whose groups are its own, so that it shares no product; otherwise None."""

    format: GptqFormat
    matrix: str | None = None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        bits, derived, stored = self.format.bits, Derived(), tensors["qzeros"]
        places = places_of_outputs(shard, 32 // bits).to(stored.device)
        order = tensors["g_idx"] if self.format.has_order else None

        def zeros() -> torch.Tensor:
            return (unpacked(stored, bits).index_select(1, places).t() + 1).to(torch.int16)

        matrix = QuantizedMatrix(
            WordCodes(tensors["qweight"].t(), bits, shard.inputs.length),
            tensors["scales"].t(),
            groups_of(shard, self.format.group, order),
            zeros=derived.make(zeros),
            derived=derived,
        )
        return quantized_product(matrix, shard, bias, updatable)
