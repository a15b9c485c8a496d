"""The experts of a layer on a GPU by the tiles that a search found, where it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ringcore.kernels.linears.found_tiles import TileProblem
from ringcore.kernels.linears.packed_weight import stored_as
from ringcore.kernels.linears.skinny_configs import last_of_range
from ringcore.kernels.linears.skinny_tiles import Config
from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertMatrices, Routing
from ringcore.kernels.partials import Partials
from ringcore.model_executor.linear_schemes.searched_scheme import Like, RandomNumbers, SearchedTiles, Streams
from ringcore.model_executor.residual import Residual

__all__ = ["SearchedExperts"]


class SearchedExperts:
    """As `ringcore.kernels.mixtures.experts.experts`, which computes it."""

    def __init__(
        self, experts: Callable[..., torch.Tensor], choose: Callable[..., Config], tiles: SearchedTiles
    ) -> None:
        """choose: as `choose_grouped`, without a search."""
        self._experts, self._otherwise, self._tiles = experts, choose, tiles
        self._known: dict[Any, Config | None] = {}

    def __call__(
        self,
        x: torch.Tensor,
        routing: Routing,
        matrices: ExpertMatrices,
        activate: Activate,
        normalise: Activate | None = None,
        *,
        counters: torch.Tensor,
        out: torch.Tensor | None = None,
        add_to: torch.Tensor | None = None,
        defer: Callable[[Partials], None] | None = None,
        norm: tuple[torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        choose = partial(self._choose, matrices)
        given = (matrices, activate, normalise), {"counters": counters, "choose": choose}
        made = self._experts(x, routing, *given[0], **given[1], out=out, add_to=add_to, defer=defer, norm=norm)
        if self._tiles.recording is not None:
            kept = _Call(self._experts, *given, Like.of(x), Like.of(made), add_to is not None, Like.of(routing.experts))
            self._tiles.recording.made(len(x), _active_bytes(matrices, len(x) * routing.k), kept.again)
        return made

    def _choose(self, matrices: ExpertMatrices, *shape: Any) -> Config:
        """shape: as of `choose_grouped`."""

        def asked() -> Config | None:
            num_experts, num_weights, num_inputs, num_tokens, k, dtype, numbers = shape
            otherwise, last = partial(self._otherwise, *shape), last_of_range(num_tokens)
            if last is None or dtype == torch.float32:
                return otherwise()
            product = num_weights, num_inputs, False, "plain", "experts", stored_as(matrices.up.stored)[1]
            return self._tiles.choose(TileProblem(*product, numbers, last, num_experts, k), otherwise)

        found = self._tiles.kept(self._known, shape, asked)
        assert found is not None, "experts are never multiplied by cuBLAS"
        return found


@dataclass
class _Call:
    """What makes the experts of a layer again, for tokens whose experts are spread evenly."""

    experts: Callable[..., torch.Tensor]
    layer: tuple[Any, ...]
    options: dict[str, Any]
    x: Like
    out: Like
    adds: bool
    chosen: Like  # [num_tokens, k]
    routing: Routing | None = None  # one that is made in a graph would be another one in every replay

    def again(self, numbers: RandomNumbers, streams: Streams) -> torch.Tensor | Residual:
        matrices: ExpertMatrices = self.layer[0]
        if self.routing is None:
            num_tokens, k = self.chosen.shape
            scores = numbers(Like(torch.Size((num_tokens, len(matrices))), torch.float32, self.x.device))
            top = scores.topk(min(k, len(matrices)), -1)
            experts = top.indices.to(self.chosen.dtype) + matrices.first
            self.routing = Routing(experts, top.values.softmax(-1).to(self.x.dtype))
        given = numbers(self.x), self.routing, *self.layer
        if self.adds:
            stream = streams.added_to(self.out)
            self.experts(*given, **self.options, add_to=stream.rows, defer=stream.defer_add)
            return stream
        out = torch.empty(self.out.shape, dtype=self.out.dtype, device=self.out.device)
        return self.experts(*given, **self.options, out=out)


def _active_bytes(matrices: ExpertMatrices, num_pairs: int) -> int:
    """The weights of as many experts as the tokens can have."""
    stored = [matrix.stored for matrix in (matrices.up, matrices.down)]
    num_bytes = sum(one.nbytes if isinstance(one, torch.Tensor) else one.codes.nbytes for one in stored)
    return int(num_bytes * min(len(matrices), num_pairs) // len(matrices))
