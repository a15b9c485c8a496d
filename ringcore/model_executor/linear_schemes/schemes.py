"""The linear scheme of each matrix of a model, by how its checkpoint is quantized."""

from __future__ import annotations

from typing import assert_never

from ringcore.checkpoint.quantization import (
    AwqFormat,
    CodesFormat,
    Format,
    GgufFormat,
    GptqFormat,
    OnLoadFormat,
    PackedFormat,
    Quantization,
)
from ringcore.model_executor.linear_schemes.awq_scheme import AwqScheme
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.dense import Dense, all_dense
from ringcore.model_executor.linear_schemes.gguf_scheme import GgufScheme
from ringcore.model_executor.linear_schemes.gptq_scheme import GptqScheme
from ringcore.model_executor.linear_schemes.on_load_scheme import OnLoadScheme
from ringcore.model_executor.linear_schemes.packed_scheme import PackedScheme
from ringcore.model_executor.linear_schemes.scheme import LinearScheme, SchemeOf

__all__ = ["schemes_of"]


def schemes_of(quantization: Quantization | None) -> SchemeOf:
    if quantization is None:
        return all_dense
    return lambda matrix: _scheme(quantization.format_of(matrix), matrix)


def _scheme(form: Format | None, matrix: str) -> LinearScheme:
    match form:
        case None:
            return Dense()
        case CodesFormat():
            has_own_scale = form.inputs is not None and form.inputs.scale == "tensor"
            return CodesScheme(form, matrix if has_own_scale else None)
        case PackedFormat():
            return PackedScheme(form, matrix if form.has_order else None)
        case GptqFormat():
            return GptqScheme(form, matrix if form.has_order else None)
        case AwqFormat():
            return AwqScheme(form)
        case OnLoadFormat():
            return OnLoadScheme(form)
        case GgufFormat():
            return GgufScheme(form)
        case _:
            assert_never(form)
