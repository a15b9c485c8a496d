"""The experts of one layer on a rank, bound to its device: the experts function of native layers and of transformers'.

Where experts are split over ranks, each has a share of every expert (tensor parallel) or some whole experts (expert
parallel). All ranks have all tokens, since the attention before is reduced over them; what each rank's share adds is
summed by one all-reduce in both ways; of whole experts by a combine where that sends less (`distributed/combine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertMatrices, Routing
from ringcore.model_executor import ops
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.layers.grouped_experts import grouped_experts
from ringcore.model_executor.layers.searched_experts import SearchedExperts
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedTiles
from ringcore.model_executor.residual import NormedRows, Residual

__all__ = ["BoundExperts"]


class BoundExperts:
    def __init__(
        self,
        matrices: ExpertMatrices,
        activate: Activate,
        tp: TensorParallel,
        normalise: Activate | None = None,
        slots: ExpertSlots | None = None,
        tiles: SearchedTiles | None = None,
        is_batch_invariant: bool = False,
    ) -> None:
        """tp: the ranks over which the experts are split; a single one where each rank has all of them. The tensors
        are used as they are, so they may get new contents. normalise: of an expert's output, before its weight, which
        is whole on one rank. slots: of whole experts, bound. tiles: what a search found, on a GPU. is_batch_invariant:
        likewise; on a CPU the matrices are."""
        self.matrices, self._activate, self._normalise, self._tp = matrices, activate, normalise, tp
        self._slots = slots
        self._hidden_size, self._dtype = matrices.down.shape[1], matrices.up.dtype
        self._has_kernels = ops.has_kernels(matrices.up.device)
        if self._has_kernels:
            from ringcore.kernels.mixtures import experts, experts_configs

            self._experts: Callable[..., torch.Tensor] = experts.experts
            self._takes_norm: Callable[..., bool] = experts.takes_norm
            if is_batch_invariant:
                from ringcore.kernels.mixtures.invariant_experts import ANY_NUMBER, InvariantExpertTiles

                choose = InvariantExpertTiles(matrices).choose
                self._experts = partial(experts.experts, choose=choose, limits=ANY_NUMBER)
                self._takes_norm = partial(experts.takes_norm, limits=ANY_NUMBER)
            elif tiles is not None:
                self._experts = SearchedExperts(experts.experts, experts_configs.choose_grouped, tiles)
            self._counters = experts.new_expert_counters(matrices)

    def __call__(self, x: NormedRows, routing: Routing) -> torch.Tensor:
        """x: [n, hidden_size] -> the weighted sum over the experts of each token, of x's shape and the matrices' dtype,
        equal on every rank."""
        if self._tp.size > 1:
            routing, ranks = self._placed(len(x), routing)
            if ranks is None:
                return self._tp.all_reduce(self._partial(x, routing)).to(self._dtype)
            out = self._empty(len(x), self._dtype)
            self._tp.combine(self._partial(x, routing), ranks, out, self._dtype, adds=False)
            return out
        if self._has_kernels:
            return self._by_kernels(x, routing, out=self._empty(len(x), self._dtype))
        return self._grouped(x, routing).to(self._dtype)

    def add_to(self, stream: Residual, x: NormedRows, routing: Routing) -> None:
        """stream [n, hidden_size] += self(x, routing), rounded once; where it is combined, also before it is added."""
        rows = stream.rows
        if self._tp.size > 1:
            routing, ranks = self._placed(len(x), routing)
            if ranks is None:
                self._tp.all_reduce_add(self._partial(x, routing), rows)
            else:
                self._tp.combine(self._partial(x, routing), ranks, rows, self._dtype, adds=True)
        elif self._has_kernels:
            defer = stream.defer_add if rows.dtype == torch.float32 else None
            self._by_kernels(x, routing, add_to=rows, defer=defer)
        else:
            rows.add_(self._grouped(x, routing))

    def _empty(self, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_tokens, self._hidden_size, dtype=dtype, device=self.matrices.down.device)

    def _placed(self, num_tokens: int, routing: Routing) -> tuple[Routing, torch.Tensor | None]:
        """The slots of the pairs; and where the sum is to be a combine, which ranks have some of each token: see
        `TensorParallel.combine`."""
        if self._slots is None:
            return routing, None
        combines = self._tp.combines(num_tokens, self._hidden_size, routing.k, self._dtype)
        if not combines and not self._slots.is_balanced:  # the slots are the experts
            return routing, None
        placed = self._slots.placed(routing.experts)
        return replace(routing, experts=placed.slots), placed.ranks if combines else None

    def _partial(self, x: NormedRows, routing: Routing) -> torch.Tensor:
        """What this rank's share adds, in float32."""
        if self._has_kernels:
            return self._by_kernels(x, routing, out=self._empty(len(x), torch.float32))
        return self._grouped(x, routing)

    def _by_kernels(self, x: NormedRows, routing: Routing, **target: Any) -> torch.Tensor:
        """target: `out`; or `add_to`, and `defer`."""
        layer = self.matrices, self._activate, self._normalise
        rows, norm = x.stream if self._takes_norm(len(x), *layer) else (x.rows, None)
        return self._experts(rows, routing, *layer, counters=self._counters, norm=norm, **target)

    def _grouped(self, x: NormedRows, routing: Routing) -> torch.Tensor:
        return grouped_experts(x.rows, routing, self.matrices, self._activate, self._normalise)
