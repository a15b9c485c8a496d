"""Dense matrices that are quantized while they are loaded: rounded to the nearest, in groups along the inputs.

An output is a row of bytes: its codes, then the float32 scales of its groups. So that a row may be encoded by itself
wherever a weight is read or updated, and codes and scales are one tensor, which sleeps and is updated as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import OnLoadFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import NibbleRows, run_of
from ringcore.model_executor.linear_schemes.block_arrangements import (
    ForDevice,
    RowBlocks,
    are_in_blocks,
    has_whole_blocks,
)
from ringcore.model_executor.linear_schemes.codes import ByteCodes, Codes, QuadCodes, WordCodes
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived, Weight

__all__ = ["EncodedRows", "OnLoadScheme", "quantize_groups"]

_LARGEST = 448.0
# Scales of a group that are tried, in terms of the one by which its largest magnitude becomes 448. Steps of e4m3 are a
# sixteenth to an eighth of a number, so a factor of two changes nothing, and one between changes which numbers have the
# smaller steps. Perplexity of SmolLM2-135M: 2.2% above float32's with the first alone, 0.7% to 1.0% with all.
_SCALES = (1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)
_HALF_STEP, _BELOW_STEP = 1 << 19, (1 << 20) - 1  # in the bits of a float32 number
_PIECE = 1 << 18  # numbers of which a CPU tries scales at a time: they stay in a core's cache


def quantize_groups(values: torch.Tensor, number: str) -> tuple[torch.Tensor, torch.Tensor]:
    """values [n, groups, group] float32 -> (codes: float8_e4m3fn, or of 4 bits uint8, scales [n, groups] float32).

    FP8: the scale of `_SCALES` with the least squared error. 4 bits: the largest magnitude becomes code 0, which is -8
    times a scale of either sign; the zero is 8. Of a group of zeros the scale is 0.
    """
    if number == "fp8":
        scales = _fp8_scales(values)
        numbers = values / scales.masked_fill(scales == 0, 1.0)
        return numbers.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales.squeeze(-1)
    scales = values.gather(-1, values.abs().argmax(-1, keepdim=True)) / -8.0
    numbers = values / scales.masked_fill(scales == 0, 1.0)
    return numbers.round_().add_(8).clamp_(0, 15).to(torch.uint8), scales.squeeze(-1)


def _fp8_scales(values: torch.Tensor) -> torch.Tensor:
    """[n, groups, group] -> [n, groups, 1]."""
    rows = max(1, _PIECE // max(1, values[0].numel())) if len(values) and values.device.type == "cpu" else len(values)
    return torch.cat([_best_scales(piece) for piece in torch.split(values, max(1, rows))])


def _best_scales(values: torch.Tensor) -> torch.Tensor:
    """Errors are those of numbers with 3 bits of mantissa: numbers below 2^-6, whose steps are equal, have no part in
    which scale is the best."""
    least = values.abs().amax(-1, keepdim=True) / _LARGEST
    whole = least.masked_fill(least == 0, 1.0)
    best, fewest = torch.ones_like(least), torch.full_like(least, math.inf)
    for factor in _SCALES:
        numbers = values / (whole * factor)
        rounded = numbers.view(torch.int32).add(_HALF_STEP).bitwise_and_(~_BELOW_STEP).view(torch.float32)
        errors = rounded.sub_(numbers).square_().sum(-1, keepdim=True).mul_(factor * factor)
        best.masked_fill_(errors < fewest, factor)
        fewest = torch.minimum(fewest, errors)
    return least * best


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

    @property
    def blocks(self) -> RowBlocks | None:
        """Of a CPU. The scales, units of 4 bytes too, are interleaved with the codes."""
        if not has_whole_blocks(self.num_inputs, Groups(self.group)):
            return None
        bits, number = (8, "fp8") if self.format.number == "fp8" else (4, "unsigned")
        return RowBlocks(bits, self.num_inputs, number)

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
        of_gpu = encoding.arrangement if self.format.number == "int4" else None
        arrangement = ForDevice(of_gpu, encoding.blocks)
        return {tensor.suffix: Weight(dense.name, shape, torch.uint8, parts, dense.init, arrangement)}

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return quantized_product(self.quantized_matrix(shard, tensors), shard, bias, updatable)

    def quantized_matrix(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
        """Of the bound tensors."""
        encoding, rows, derived = EncodedRows(self.format, shard.inputs.length), tensors["weight"], Derived()
        codes, scales = encoding.views(rows)
        blocks = encoding.blocks if are_in_blocks(rows.device) else None
        stored: Codes
        if blocks is not None:
            stored = in_blocks = blocks.codes(rows)
            scales = derived.make(lambda: encoding.views(in_blocks.restored(0, len(rows)))[1].clone())
        elif self.format.number == "fp8":
            stored = ByteCodes(codes.view(torch.float8_e4m3fn))
        elif ops.has_kernels(codes.device):
            words = tensors["weight"].view(torch.int16)[:, : -(-shard.inputs.length // 4)]
            stored = QuadCodes(words, encoding.arrangement.run, shard.inputs.length)
        else:
            stored = WordCodes(codes, 4, shard.inputs.length)
        zero = 8 if self.format.number == "int4" else 0
        return QuantizedMatrix(stored, scales, Groups(encoding.group), zero=zero, derived=derived)
