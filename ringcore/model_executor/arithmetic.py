"""Which algorithms compute a model's operations: the fastest for the shapes of a step, or those that give a row the
same bits in every step.

Of a model this is the one place that knows the engine options `deterministic` and `kernel_autotune`: a layer asks for
its linear schemes, its ranks, its router and its experts, and takes what it gets. Norms, gates and rotations are
kernels that compute each row by itself anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.distributed.rank_order import RankOrdered
from ringcore.errors import ConfigError
from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertGate, ExpertWeight, RouterForm, Routing
from ringcore.kernels.native.attention_kernels import attention_kernel
from ringcore.kernels.native.row_kernels import row_kernels
from ringcore.model_executor.layers.router import BoundRouter, InvariantRouter
from ringcore.model_executor.linear_schemes.invariant_experts import InvariantExperts
from ringcore.model_executor.linear_schemes.invariant_product import ONE_SIZE, multiply_in_tiles
from ringcore.model_executor.linear_schemes.invariant_scheme import InvariantScheme
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedScheme, SearchedTiles
from ringcore.model_executor.residual import NormedRows

__all__ = ["FASTEST", "Arithmetic", "BatchInvariant", "Route", "Searched", "arithmetic_of"]

Route = Callable[[torch.Tensor], Routing]  # x [n, hidden_size]


class Arithmetic:
    """The fastest."""

    is_batch_invariant = False
    expert_gate: Activate = ExpertGate()  # of the experts of native models
    tiles: SearchedTiles | None = None  # of them, by a search

    def schemes(self, scheme_of: SchemeOf) -> SchemeOf:
        """Of the linears of a model whose matrices are stored as `scheme_of` says."""
        return scheme_of

    def ranks(self, tp: TensorParallel) -> TensorParallel:
        """The collectives of a model's layers."""
        return tp

    def expert_weight(self, weight: ExpertWeight) -> ExpertWeight:
        """The products of the experts of a layer."""
        return weight

    def route(self, route: Route) -> Route:
        """The router of a layer, on a CPU."""
        return route

    def router(self, weight: torch.Tensor, form: RouterForm) -> Callable[[NormedRows], Routing]:
        """The router of a layer, on a GPU. weight: [num_experts, hidden_size]."""
        return BoundRouter(weight, form)


FASTEST = Arithmetic()


class Searched(Arithmetic):
    """The fastest by a search on this device, for the shapes of this model: the engine option `kernel_autotune`."""

    def __init__(self, tiles: SearchedTiles) -> None:
        self.tiles = tiles

    def schemes(self, scheme_of: SchemeOf) -> SchemeOf:
        assert self.tiles is not None
        tiles = self.tiles
        return lambda matrix: SearchedScheme(scheme_of(matrix), tiles)


class BatchInvariant(Arithmetic):
    is_batch_invariant = True

    def __init__(self, device: torch.device) -> None:
        """Raises `ConfigError` where the device has not what it takes."""
        self._device = device
        self._known: dict[Hashable, tuple[int, ...]] = {}
        if device.type != "cpu":
            return
        kernels = row_kernels()
        if kernels is None or attention_kernel() is None:
            raise ConfigError(
                "deterministic=True: on a CPU its kernels are compiled when it starts, and there is no C compiler that "
                "does; install one (cc, gcc or clang), or give deterministic=False",
                option="deterministic",
                value=True,
            )
        self.expert_gate = kernels.silu_and_mul

    def schemes(self, scheme_of: SchemeOf) -> SchemeOf:
        return lambda matrix: InvariantScheme(scheme_of(matrix), self._known)

    def ranks(self, tp: TensorParallel) -> TensorParallel:
        return tp if tp.size == 1 else RankOrdered(tp)

    def expert_weight(self, weight: ExpertWeight) -> ExpertWeight:
        return InvariantExperts(weight) if self._device.type == "cpu" else weight

    def route(self, route: Route) -> Route:
        def routed(x: torch.Tensor) -> Routing:
            def packed(rows: torch.Tensor) -> torch.Tensor:
                found = route(rows)
                return torch.cat((found.experts.double(), found.weights.double()), 1)

            experts, weights = multiply_in_tiles(packed, x, ONE_SIZE).chunk(2, 1)
            return Routing(experts.long(), weights.to(x.dtype))

        return routed

    def router(self, weight: torch.Tensor, form: RouterForm) -> Callable[[NormedRows], Routing]:
        return InvariantRouter(weight, form)


def arithmetic_of(deterministic: bool, device: torch.device, tiles: SearchedTiles | None = None) -> Arithmetic:
    """deterministic: the engine option. tiles: what a search found, or is to find. Raises `ConfigError`."""
    if deterministic:
        return BatchInvariant(device)
    return FASTEST if tiles is None else Searched(tiles)
