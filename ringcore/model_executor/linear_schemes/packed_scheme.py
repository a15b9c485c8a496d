"""compressed-tensors' pack-quantized matrices: 4- and 8-bit integers packed along the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import PackedFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import NibbleRows, run_of
from ringcore.model_executor.linear_schemes.block_arrangements import (
    ForDevice,
    RowBlocks,
    are_in_blocks,
    has_whole_blocks,
)
from ringcore.model_executor.linear_schemes.codes import Codes, QuadCodes, WordCodes, unpacked
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import (
    QuantizedMatrix,
    groups_of,
    places_of_outputs,
    with_zero_bits,
)
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived, Weight

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
        bits, derived, has_zeros = self.format.bits, Derived(), self.format.has_zeros
        words, scales, num_inputs = tensors["weight_packed"], tensors["weight_scale"], shard.inputs.length
        groups = groups_of(shard, self.format.group, tensors["weight_g_idx"] if self.format.has_order else None)

        def zeros() -> torch.Tensor:
            stored = tensors["weight_zero_point"]  # [num_outputs / per_word, groups]
            places = places_of_outputs(shard, 32 // bits).to(stored.device)
            return unpacked(stored.t(), bits).index_select(1, places).t().to(torch.int16)

        if bits == 4 and ops.has_kernels(words.device):
            rows = words.view(torch.int16)[:, : -(-num_inputs // 4)]
            quads = QuadCodes(rows, self._arrangement(shard).run, num_inputs)
            scales = with_zero_bits(scales, zeros, derived) if has_zeros else scales
            return QuantizedMatrix(quads, scales, groups, zero=8, has_zero_bits=has_zeros, derived=derived)
        blocks = self._blocks(shard) if are_in_blocks(words.device) else None
        codes: Codes = WordCodes(words, bits, num_inputs) if blocks is None else blocks.codes(words)
        stored_zeros = derived.make(zeros) if has_zeros else None
        return QuantizedMatrix(codes, scales, groups, zero=1 << (bits - 1), zeros=stored_zeros, derived=derived)

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        weights = LinearScheme.weights(self, shard)
        of_gpu = self._arrangement(shard) if self.format.bits == 4 else None
        arrangement = ForDevice(of_gpu, self._blocks(shard))
        return weights | {"weight_packed": replace(weights["weight_packed"], arrangement=arrangement)}

    def _arrangement(self, shard: LinearShard) -> NibbleRows:
        num_inputs, groups = shard.inputs.length, groups_of(shard, self.format.group)
        return NibbleRows(num_inputs, run_of(num_inputs, groups.size, groups.offset))

    def _blocks(self, shard: LinearShard) -> RowBlocks | None:
        num_inputs, groups = shard.inputs.length, groups_of(shard, self.format.group)
        is_whole = not self.format.has_order and has_whole_blocks(num_inputs, groups)
        return RowBlocks(self.format.bits, num_inputs) if is_whole else None
