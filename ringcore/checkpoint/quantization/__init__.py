"""Quantized checkpoints as data: which matrices are of which format, read from `quantization_config`, without torch."""

from ringcore.checkpoint.quantization.expert_formats import ExpertsFormat, Mxfp4Format
from ringcore.checkpoint.quantization.formats import (
    GGUF_BLOCKS,
    AwqFormat,
    CodesFormat,
    Format,
    GgufFormat,
    GptqFormat,
    OnLoadFormat,
    PackedFormat,
)
from ringcore.checkpoint.quantization.inputs import InputFormat
from ringcore.checkpoint.quantization.rules import BlockKinds, Quantization, Rule

__all__ = [
    "GGUF_BLOCKS",
    "AwqFormat",
    "BlockKinds",
    "CodesFormat",
    "ExpertsFormat",
    "Format",
    "GgufFormat",
    "GptqFormat",
    "InputFormat",
    "Mxfp4Format",
    "OnLoadFormat",
    "PackedFormat",
    "Quantization",
    "Rule",
]
