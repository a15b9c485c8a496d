"""Experts whose matrices a checkpoint has one by one, each in a linear scheme: as those of a fused linear, stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ringcore.errors import ModelLoadError
from ringcore.kernels.dense_experts import DenseExperts
from ringcore.kernels.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.packed_scheme import PackedScheme
from ringcore.model_executor.linear_schemes.scheme import LinearScheme, SchemeOf
from ringcore.model_executor.linear_schemes.shard import LinearShard

__all__ = ["StackedScheme", "stacked_scheme", "stacked_weight"]

StackedScheme = Dense | CodesScheme | PackedScheme


def stacked_scheme(matrices: Iterable[str], scheme_of: SchemeOf) -> StackedScheme:
    """That all these matrices have. Raises `ModelLoadError` where they differ, or cannot be stacked."""
    schemes: dict[LinearScheme, str] = {}
    for matrix in matrices:
        schemes.setdefault(scheme_of(matrix), matrix)
    (scheme, matrix), *others = schemes.items()
    if others:
        raise ModelLoadError(
            f"{matrix!r} is quantized otherwise than {others[0][1]!r}; quantize all experts of a layer alike, or none"
        )
    if not isinstance(scheme, StackedScheme):
        raise ModelLoadError(f"{matrix!r} is in a format in which experts are not computed; give another checkpoint")
    return scheme


def stacked_weight(
    scheme: StackedScheme, shard: LinearShard, tensors: Mapping[str, torch.Tensor], num_experts: int
) -> ExpertWeight:
    """shard: of the matrices of all experts of a rank, expert by expert; tensors: its bound ones, by suffix."""
    match scheme:
        case Dense():
            return DenseExperts(tensors["weight"].view(num_experts, -1, shard.inputs.length))
        case CodesScheme():
            rounding = scheme.rounding(shard, tensors)
            return QuantizedExperts(scheme.quantized_matrix(shard, tensors), num_experts, shard.dtype, rounding)
        case PackedScheme():
            return QuantizedExperts(scheme.quantized_matrix(shard, tensors), num_experts, shard.dtype)
