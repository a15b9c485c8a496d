"""The formats of quantized experts: the tensors of each, of one expert's matrix.

Mxfp4Format    4-bit floats with a power of 2 for every 32 inputs, as gpt-oss is published

Experts that a checkpoint has one by one are matrices in the formats of linears, of which `can_stack` takes some.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ringcore.checkpoint.matrix_tensors import Fixed, Inputs, MatrixTensor, Outputs
from ringcore.checkpoint.quantization.formats import (
    AwqFormat,
    CodesFormat,
    Format,
    GptqFormat,
    OnLoadFormat,
    PackedFormat,
)

__all__ = ["ExpertsFormat", "Mxfp4Format", "can_stack", "has_order"]

# Ranges of dummy weights. Scales of 2^-8 and 2^-7: with random blocks the matrices have a deviation of 0.018.
_BLOCKS, _EXPONENTS = (0.0, 256.0), (119.0, 121.0)


class Mxfp4Format(msgspec.Struct, frozen=True, tag="mxfp4", forbid_unknown_fields=True):
    """A checkpoint has one tensor for all experts of a layer. Two numbers are a byte; a scale is an exponent + 127, of
    which 255 is no number."""

    group: ClassVar[int] = 32

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return (
            MatrixTensor("_blocks", (Outputs(), Inputs(self.group), Fixed(self.group // 2)), "U8", dummy=_BLOCKS),
            MatrixTensor("_scales", (Outputs(), Inputs(self.group)), "U8", dummy=_EXPONENTS),
        )


ExpertsFormat = Mxfp4Format


def can_stack(form: Format | None) -> bool:
    """Whether matrices of this format, which a checkpoint has one by one, are computed as experts: of a GGUF file they
    are not, nor where inputs have a scale of the checkpoint for each matrix."""
    match form:
        case CodesFormat():
            return form.inputs is None or form.inputs.scale != "tensor"
        case None | PackedFormat() | GptqFormat() | AwqFormat() | OnLoadFormat():
            return True
        case _:
            return False


def has_order(form: Format | None) -> bool:
    """Whether each matrix has its inputs in an order of its own: gate and up of an expert share no product."""
    return isinstance(form, PackedFormat | GptqFormat) and form.has_order
