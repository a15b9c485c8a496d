"""The formats of quantized matrices: the tensors of each in a checkpoint.

CodesFormat    a byte a number, FP8 or INT8: compressed-tensors' float-, int- and naive-quantized, and quant_method fp8
PackedFormat   4 or 8 bits packed along the inputs: compressed-tensors' pack-quantized
GptqFormat     4 or 8 bits packed along the inputs, inputs first, perhaps in act-order
AwqFormat      4 bits packed along the outputs, interleaved, inputs first
OnLoadFormat   a dense matrix in the checkpoint, quantized while it is loaded
GgufFormat     blocks of a GGUF file, as they lie there

Everywhere but in GGUF files: weight = (code - zero) * scale.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ringcore.checkpoint.matrix_tensors import DENSE, AllInputs, Axis, Fixed, Inputs, MatrixTensor, Outputs
from ringcore.checkpoint.quantization.inputs import InputFormat

__all__ = [
    "GGUF_BLOCKS",
    "AwqFormat",
    "CodesFormat",
    "Format",
    "GgufFormat",
    "GptqFormat",
    "OnLoadFormat",
    "PackedFormat",
]

# Ranges of dummy weights: with the scales' the matrices have about the variance of trained ones.
_WORDS = (-(2.0**31), 2.0**31 - 256)
_FP8, _FP8_SCALES = (-2.0, 2.0), (0.01, 0.03)
_INT8, _INT8_SCALES = (-127.0, 127.0), (0.0002, 0.0004)
_INT4_SCALES = (0.004, 0.008)


class CodesFormat(msgspec.Struct, frozen=True, tag="codes", forbid_unknown_fields=True):
    """scale: one of the matrix, of each output, of each output and `block[1]` inputs, or of each block of `block` =
    (outputs, inputs)."""

    number: Literal["fp8", "int8"]
    scale: Literal["tensor", "channel", "group", "block"]
    block: tuple[int, int] = (1, 1)
    scale_name: str = "weight_scale"
    inputs: InputFormat | None = None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        is_fp8 = self.number == "fp8"
        codes = MatrixTensor(
            "weight", (Outputs(), Inputs()), "F8_E4M3" if is_fp8 else "I8", dummy=_FP8 if is_fp8 else _INT8
        )
        scales = MatrixTensor(self.scale_name, self._scale_axes, "F32", dummy=_FP8_SCALES if is_fp8 else _INT8_SCALES)
        if self.inputs is None or self.inputs.scale != "tensor":
            return codes, scales
        return codes, scales, MatrixTensor("input_scale", (Fixed(1),), "F32", dummy=(0.01, 0.02))

    @property
    def _scale_axes(self) -> tuple[Axis, ...]:
        match self.scale:
            case "tensor":
                return (Fixed(1),)
            case "channel":
                return Outputs(), Fixed(1)
            case "group" | "block":
                return Outputs(self.block[0], is_shared=True), Inputs(self.block[1], is_shared=True)


class PackedFormat(msgspec.Struct, frozen=True, tag="packed", forbid_unknown_fields=True):
    """group: inputs that share a scale; None: all. has_order: the group of each input is in `weight_g_idx`."""

    bits: Literal[4, 8]
    group: int | None
    has_zeros: bool = False
    has_order: bool = False

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        per_word, groups = 32 // self.bits, _group_axis(self.group, self.has_order)
        dummy = _INT4_SCALES if self.bits == 4 else _INT8_SCALES
        tensors = [
            MatrixTensor("weight_packed", (Outputs(), Inputs(per_word)), "I32", dummy=_WORDS),
            MatrixTensor("weight_scale", (Outputs(), groups), "F32", dummy=dummy),
            MatrixTensor("weight_shape", (Fixed(2),), "I64", dummy=(0.0, 1.0)),
        ]
        if self.has_zeros:
            tensors.append(MatrixTensor("weight_zero_point", (Outputs(per_word), groups), "I32", dummy=_WORDS))
        if self.has_order:
            tensors.append(MatrixTensor("weight_g_idx", (Inputs(),), "I32", dummy=(0.0, 1.0)))
        return tuple(tensors)


class GptqFormat(msgspec.Struct, frozen=True, tag="gptq", forbid_unknown_fields=True):
    """Zeros are stored less one. has_order: with act-order ("desc_act"), the group of each input is in `g_idx`;
    otherwise `g_idx` counts up."""

    bits: Literal[4, 8]
    group: int | None
    has_order: bool = False

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        per_word, groups = 32 // self.bits, _group_axis(self.group, self.has_order)
        dummy = _INT4_SCALES if self.bits == 4 else _INT8_SCALES
        return (
            MatrixTensor("qweight", (Inputs(per_word), Outputs()), "I32", dummy=_WORDS),
            MatrixTensor("qzeros", (groups, Outputs(per_word)), "I32", dummy=_WORDS),
            MatrixTensor("scales", (groups, Outputs()), "F32", dummy=dummy),
            MatrixTensor("g_idx", (Inputs(),), "I32", dummy=(0.0, 1.0)),
        )


class AwqFormat(msgspec.Struct, frozen=True, tag="awq", forbid_unknown_fields=True):
    """Of 4 bits, as its "gemm" version: the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight are the nibbles of a word, from the
    lowest."""

    group: int | None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        groups = _group_axis(self.group, has_order=False)
        return (
            MatrixTensor("qweight", (Inputs(), Outputs(8)), "I32", dummy=_WORDS),
            MatrixTensor("qzeros", (groups, Outputs(8)), "I32", dummy=_WORDS),
            MatrixTensor("scales", (groups, Outputs()), "F32", dummy=_INT4_SCALES),
        )


class OnLoadFormat(msgspec.Struct, frozen=True, tag="on_load", forbid_unknown_fields=True):
    """number: of the codes. group: inputs that share a scale, where a rank's share is whole groups of as many."""

    number: Literal["fp8", "int4"]
    group: int = 128

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return DENSE

    def group_of(self, num_inputs: int) -> int:
        """Of a share of num_inputs: the largest group that divides both."""
        return math.gcd(self.group, num_inputs)

    def row_bytes(self, num_inputs: int) -> int:
        """Of an output in memory: its codes, then its scales in float32, each from a multiple of 16 bytes."""
        codes = num_inputs if self.number == "fp8" else -(-num_inputs // 2)
        return _aligned(codes) + _aligned(4 * (num_inputs // self.group_of(num_inputs)))


GGUF_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
}  # (numbers, bytes) of a block, by the names of GGML's types


class GgufFormat(msgspec.Struct, frozen=True, tag="gguf", forbid_unknown_fields=True):
    """kind: one of `GGUF_BLOCKS`. rounds_inputs: of a product, to 8 bits with a scale for each 32."""

    kind: str
    rounds_inputs: bool = False

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        """As numbers, by which the shapes are compared."""
        return DENSE

    @property
    def block(self) -> tuple[int, int]:
        """(numbers, bytes) of a block, which is of consecutive inputs of an output."""
        return GGUF_BLOCKS[self.kind]

    def row_bytes(self, num_inputs: int) -> int:
        """Of an output, in the file as in memory. num_inputs: of whole blocks."""
        numbers, num_bytes = self.block
        assert num_inputs % numbers == 0, (self, num_inputs)
        return num_inputs // numbers * num_bytes


Format = CodesFormat | PackedFormat | GptqFormat | AwqFormat | OnLoadFormat | GgufFormat


def _group_axis(group: int | None, has_order: bool) -> Axis:
    if group is None:
        return Fixed(1)
    return AllInputs(group) if has_order else Inputs(group, is_shared=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
