"""Quantized checkpoints as data: which matrices are of which format, read from `quantization_config`, without torch."""

from ringcore.checkpoint.quantization.expert_formats import ExpertsFormat, Mxfp4Format
from ringcore.checkpoint.quantization.formats import (
    AwqFormat,
    CodesFormat,
    Format,
    GptqFormat,
    OnLoadFormat,
    PackedFormat,
)
from ringcore.checkpoint.quantization.inputs import InputFormat
from ringcore.checkpoint.quantization.rules import Quantization, Rule

__all__ = [
    "AwqFormat",
    "CodesFormat",
    "ExpertsFormat",
    "Format",
    "GptqFormat",
    "InputFormat",
    "Mxfp4Format",
    "OnLoadFormat",
    "PackedFormat",
    "Quantization",
    "Rule",
]
