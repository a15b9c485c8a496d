"""The router of a mixture bound to a GPU: of native layers and of transformers'."""

from __future__ import annotations

from functools import partial

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.kernels.mixtures.expert_matrices import RouterForm, Routing
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.residual import NormedRows

__all__ = ["BoundRouter", "InvariantRouter"]


class BoundRouter:
    def __init__(
        self,
        weight: torch.Tensor,
        form: RouterForm,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        """As `kernels.router.route` takes them. The tensors are used as they are, so they may get new contents."""
        from ringcore.kernels.mixtures import router

        self._weight = weight
        counters = router.new_router_counters(weight.device)
        self._route = partial(
            router.route, weight=weight, form=form, counters=counters, bias=bias, correction=correction
        )
        self._takes_norm = router.takes_norm

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._weight.dtype

    def __call__(self, x: NormedRows) -> Routing:
        """x: [n, hidden_size]. The norm of few tokens is a prologue, which leaves the rows that their experts read."""
        if not self._takes_norm(len(x), self._weight):
            return self._route(x.rows)
        rows, norm = x.stream
        normed = x.to_fill(self.dtype) if norm is not None and len(x) > 1 else None
        return self._route(rows, norm=norm, normed=normed)


class InvariantRouter:
    """A router on a GPU whose choice for a token does not depend on how many there are."""

    def __init__(self, weight: torch.Tensor, form: RouterForm) -> None:
        from ringcore.kernels.mixtures.router import choose_experts

        self._logits = KernelProduct(weight, None, torch.float32).batch_invariant()
        self._form, self._choose = form, choose_experts

    def __call__(self, x: NormedRows) -> Routing:
        return self._choose(x.rows, self._logits(x.rows, NO_TOKEN_CONTEXT)[None], self._form)
