"""The matrices of one layer on one rank, each in its scheme: the weights that they declare, the product they bind."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch

from ringcore.checkpoint.matrix_tensors import BIAS
from ringcore.model_executor.linear_schemes.product import Product, SideBySide
from ringcore.model_executor.linear_schemes.scheme import LinearScheme, SchemeOf
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Tensors, Weight

__all__ = ["FusedMatrices"]


class FusedMatrices:
    """Neighbours of one scheme are one fused matrix; where the schemes differ, there are several products."""

    def __init__(self, shard: LinearShard, scheme_of: SchemeOf) -> None:
        runs = [
            (scheme, tuple(outputs))
            for scheme, outputs in groupby(shard.outputs, lambda outputs: scheme_of(outputs.checkpoint_name))
        ]
        self._matrices: list[tuple[LinearShard, LinearScheme]]
        if len(runs) == 1:
            self._matrices = [(shard, runs[0][0])]
        else:
            self._matrices = [(shard.of_outputs(i, outputs), scheme) for i, (scheme, outputs) in enumerate(runs)]

    def weights(self, borrowed: frozenset[str] = frozenset()) -> list[Weight]:
        """borrowed: suffixes of tensors that belong to another layer."""
        found: list[Weight] = []
        for shard, scheme in self._matrices:
            found += [weight for suffix, weight in scheme.weights(shard).items() if suffix not in borrowed]
            if shard.has_bias:
                found.append(shard.weight(BIAS))
        return found

    def bind(
        self,
        tensors: Tensors,
        updatable: bool,
        *,
        adds_bias: bool = True,
        borrowed: Mapping[str, torch.Tensor] | None = None,
    ) -> Product:
        """Pops the tensors of `weights`. adds_bias: False on a rank whose product is summed with one that adds it.
        borrowed: the other layer's tensors, by suffix."""
        products = []
        for shard, scheme in self._matrices:
            own = dict(borrowed or {})
            own |= {
                suffix: tensors.pop(weight.name)
                for suffix, weight in scheme.weights(shard).items()
                if suffix not in own
            }
            bias = tensors.pop(shard.weight(BIAS).name) if shard.has_bias else None
            products.append(scheme.product(shard, own, bias if adds_bias else None, updatable))
        if len(products) == 1:
            return products[0]
        return SideBySide(products, [sum(each.length for each in shard.outputs) for shard, _ in self._matrices])
