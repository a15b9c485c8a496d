"""Experts whose matrices a checkpoint has one by one, each in a linear scheme: their tensors stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.quantization.expert_formats import has_order
from ringcore.errors import ModelLoadError
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor import ops
from ringcore.model_executor.expert_schemes.cpu_experts import cpu_experts
from ringcore.model_executor.expert_schemes.joined import joined
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.linear_schemes.awq_scheme import AwqScheme
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.gptq_scheme import GptqScheme
from ringcore.model_executor.linear_schemes.on_load_scheme import OnLoadScheme
from ringcore.model_executor.linear_schemes.packed_scheme import PackedScheme
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.scheme import LinearScheme, SchemeOf
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Arrangement, Weight, WeightPart

__all__ = ["ExpertStack", "StackedScheme", "shares_products", "stacked_scheme"]

_Quantized = CodesScheme | PackedScheme | GptqScheme | AwqScheme | OnLoadScheme
StackedScheme = Dense | _Quantized
_ON_CPU = "give device='cpu', or a checkpoint without it"


def stacked_scheme(matrices: Iterable[str], scheme_of: SchemeOf) -> StackedScheme:
    """That all these matrices have. Raises `ModelLoadError` where they differ, or cannot be stacked."""
    schemes: dict[LinearScheme, str] = {}
    for matrix in matrices:
        scheme = scheme_of(matrix)
        if isinstance(scheme, PackedScheme | GptqScheme):
            scheme = replace(scheme, matrix=None)
        schemes.setdefault(scheme, matrix)
    (scheme, matrix), *others = schemes.items()
    if others:
        raise ModelLoadError(
            f"{matrix!r} is quantized otherwise than {others[0][1]!r}; quantize all experts of a layer alike, or none"
        )
    if not isinstance(scheme, StackedScheme):
        raise ModelLoadError(f"{matrix!r} is in a format in which experts are not computed; give another checkpoint")
    return scheme


def shares_products(scheme: StackedScheme) -> bool:
    """Whether gate and up of an expert may be one matrix."""
    return not isinstance(scheme, PackedScheme | GptqScheme) or not has_order(scheme.format)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A matrix of each expert of a rank, or fused ones: the tensors that a linear of them has, expert by expert along
    their first dimension."""

    name: str
    scheme: StackedScheme
    shards: tuple[LinearShard, ...]  # of each expert

    def weights(self) -> dict[str, Weight]:
        """By suffix."""
        each = [self.scheme.weights(shard) for shard in self.shards]
        return {suffix: self._stacked(suffix, [one[suffix] for one in each]) for suffix in each[0]}

    def _stacked(self, suffix: str, weights: list[Weight]) -> Weight:
        rows, *inner = weights[0].shape
        parts = tuple(_moved(part, rows * index) for index, one in enumerate(weights) for part in one.parts)
        arrangement = weights[0].arrangement
        return replace(
            weights[0],
            name=f"{self.name}.{suffix}",
            shape=(rows * len(weights), *inner),
            parts=parts,
            arrangement=None if arrangement is None else _OfEach(arrangement, len(weights)),
        )

    def bound(self, tensors: Mapping[str, torch.Tensor], updatable: bool) -> ExpertWeight:
        """tensors: those of `weights`. updatable: see `LinearScheme.product`."""
        scheme, first, num_experts = self.scheme, self.shards[0], len(self.shards)
        if isinstance(scheme, Dense):
            return DenseExperts(tensors["weight"].view(num_experts, -1, first.inputs.length))
        rounding = scheme.rounding(first, tensors) if isinstance(scheme, CodesScheme) else None
        if not ops.has_kernels(next(iter(tensors.values())).device):
            return cpu_experts(self._matrices(scheme, tensors), first.dtype, updatable, rounding)
        if not shares_products(scheme):
            raise ModelLoadError(f"{self.name!r} is in act-order, of which a GPU multiplies no experts; {_ON_CPU}")
        if isinstance(scheme, GptqScheme | AwqScheme):
            matrix = joined(self._matrices(scheme, tensors))
        else:
            every_output = tuple(outputs for shard in self.shards for outputs in shard.outputs)
            matrix = scheme.quantized_matrix(replace(first, outputs=every_output), tensors)
        return QuantizedExperts([matrix], num_experts, first.dtype, rounding)

    def _matrices(self, scheme: _Quantized, tensors: Mapping[str, torch.Tensor]) -> list[QuantizedMatrix]:
        """Of each expert."""
        rows = {suffix: tensor.chunk(len(self.shards)) for suffix, tensor in tensors.items()}
        return [
            scheme.quantized_matrix(shard, {suffix: of_each[expert] for suffix, of_each in rows.items()})
            for expert, shard in enumerate(self.shards)
        ]


def _moved(part: WeightPart, by: int) -> WeightPart:
    """Its place as many rows further on."""
    if part.dim == 0:
        return replace(part, offset=part.offset + by)
    return replace(part, row=(part.row or 0) + by)


@dataclass(frozen=True, slots=True)
class _OfEach(Arrangement):
    """Of as many equal tensors, one after the other."""

    inner: Arrangement
    num_tensors: int

    def is_used_on(self, device: torch.device) -> bool:
        return self.inner.is_used_on(device)

    def arrange(self, tensor: torch.Tensor) -> None:
        for one in tensor.chunk(self.num_tensors):
            self.inner.arrange(one)

    def restore(self, tensor: torch.Tensor) -> None:
        for one in tensor.chunk(self.num_tensors):
            self.inner.restore(one)
