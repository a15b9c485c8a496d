"""Dense matrices that are quantized while they are loaded: rounded to the nearest, in groups along the inputs.

An output is a row of bytes: its codes, then the float32 scales of its groups. So that a row may be encoded by itself
wherever a weight is read or updated, and codes and scales are one tensor, which sleeps and is updated as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import OnLoadFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import NibbleRows, run_of
from ringcore.model_executor.linear_schemes.codes import ByteCodes, Codes, QuadCodes, WordCodes
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Weight

__all__ = ["EncodedRows", "OnLoadScheme", "quantize_groups"]


def quantize_groups(values: torch.Tensor, number: str) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., group] float32 -> (codes: float8_e4m3fn, or of 4 bits uint8, scales [...] float32).

    FP8: the largest magnitude becomes 448. 4 bits: it becomes code 0, which is -8 times a scale of either sign; the
    zero is 8. Of a group of zeros the scale is 0.
    """
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scales = largest / (448.0 if number == "fp8" else -8.0)
    scales = scales.abs() if number == "fp8" else scales
    numbers = values / scales.masked_fill(scales == 0, 1.0)
    if number == "fp8":
        return numbers.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), scales.squeeze(-1)
    return numbers.round_().add_(8).clamp_(0, 15).to(torch.uint8), scales.squeeze(-1)


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of numbers to rows of bytes: a `RowEncoding`."""

    format: OnLoadFormat
    num_inputs: int
    dtype: torch.dtype = torch.float32

    @property
    def group(self) -> int:
        return self.format.group_of(self.num_inputs)

    @property
    def arrangement(self) -> NibbleRows:
        """Of 4-bit codes."""
        return NibbleRows(self.num_inputs, run_of(self.num_inputs, self.group))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, num_inputs] -> [n, row bytes] uint8."""
        codes, scales = quantize_groups(rows.float().reshape(len(rows), -1, self.group), self.format.number)
        encoded = rows.new_zeros(len(rows), self.format.row_bytes(self.num_inputs), dtype=torch.uint8)
        stored_codes, stored_scales = self.views(encoded)
        codes = codes.view(torch.uint8).flatten(1)
        if self.format.number == "int4":
            codes = torch.nn.functional.pad(codes, (0, self.num_inputs % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        stored_codes.copy_(codes)
        stored_scales.copy_(scales)
        return encoded

    def views(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """encoded: [n, row bytes] -> its codes [n, bytes] uint8, its scales [n, groups] float32."""
        code_bytes = self.num_inputs if self.format.number == "fp8" else -(-self.num_inputs // 2)
        num_groups = self.num_inputs // self.group
        scales = encoded[:, -(-code_bytes // 16) * 16 :].view(torch.float32)
        return encoded[:, :code_bytes], scales[:, :num_groups]


@dataclass(frozen=True, slots=True)
class OnLoadScheme(LinearScheme):
    format: OnLoadFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        (tensor,) = self.tensors
        dense, encoding = shard.weight(tensor), EncodedRows(self.format, shard.inputs.length)
        parts = tuple(replace(part, encoding=encoding) for part in dense.parts)
        shape = (dense.shape[0], self.format.row_bytes(shard.inputs.length))
        arrangement = encoding.arrangement if self.format.number == "int4" else None
        return {tensor.suffix: Weight(dense.name, shape, torch.uint8, parts, dense.init, arrangement)}

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        encoding = EncodedRows(self.format, shard.inputs.length)
        codes, scales = encoding.views(tensors["weight"])
        stored: Codes
        if self.format.number == "fp8":
            stored = ByteCodes(codes.view(torch.float8_e4m3fn))
        elif ops.has_kernels(codes.device):
            words = tensors["weight"].view(torch.int16)[:, : -(-shard.inputs.length // 4)]
            stored = QuadCodes(words, encoding.arrangement.run, shard.inputs.length)
        else:
            stored = WordCodes(codes, 4, shard.inputs.length)
        matrix = QuantizedMatrix(stored, scales, Groups(encoding.group), zero=8 if self.format.number == "int4" else 0)
        return quantized_product(matrix, shard, bias, updatable)
